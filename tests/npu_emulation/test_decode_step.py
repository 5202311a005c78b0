"""docs/decode-step.md lists what a captured and a replayed step execute, and nothing else."""

from __future__ import annotations

import json

from function_trace import check_documented

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT
from npu_emulation.sglang_runs import (
    FUSED_ATTENTION,
    INTERPRETED_MLA,
    prompt,
    requests,
    start,
)

MOST_FILES = 16
STEPS_IN_A_GRAPH = (*MTP, *SHORT_CONTEXT, "--cuda-graph-bs-decode", "1")


def test_the_page_lists_what_a_step_executes(guessable, tmp_path):
    functions = tmp_path / "functions.json"
    process, report = start(
        guessable,
        [requests([prompt(5, 1)], max_new_tokens=4)],
        STEPS_IN_A_GRAPH,
        FUSED_ATTENTION | INTERPRETED_MLA | {"STEP_FUNCTIONS": str(functions)},
        program=("npu_emulation.traced_step",),
    )
    assert report is not None, process.stderr[-2000:]
    executed = json.loads(functions.read_text())
    in_order = [*executed["replayed"], *executed["captured"]]
    check_documented("On an NPU", in_order, MOST_FILES)
