"""SGLang served on the emulated NPU in a process of its own, as the tests of it ask for it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from begun import template

from benchmarks.npu_step import AUTOLOAD
from npu_emulation.environment import DEVICES
from npu_emulation.followers import TP_SIZE
from npu_emulation.report import Report

GREEDY = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}

# A small pool of pages of 128 tokens, graphs for batches of 1 and 4, turns of 512 tokens.
FLAGS = """--device npu --dtype bfloat16 --skip-tokenizer-init --max-total-tokens 4096
    --max-running-requests 8 --mem-fraction-static 0.2 --chunked-prefill-size 512
    --cuda-graph-bs-decode 1 4 --cuda-graph-backend-prefill disabled""".split()
EAGER = ("--disable-cuda-graph", "--disable-overlap-schedule")
NEXTN = """--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1
    --speculative-num-draft-tokens 3""".split()
FUSED_ATTENTION = {"ASCEND_USE_FIA": "1"}  # SGLang's switch between ATB's operators and CANN's
# Latent attention program by program, which takes four times as long as all else.
INTERPRETED_MLA = {"NPU_EMULATION_INTERPRET_MLA": "1"}

Wave = list[dict[str, Any]]


def prompt(length: int, seed: int, vocabulary: int = 4096) -> list[int]:
    return [(7 * seed + 3 * i * (seed + 1)) % (vocabulary - 8) + 5 for i in range(length)]


def chat_prompts(folder: Path, questions: Sequence[str]) -> list[list[int]]:
    """Each question as the first turn of a chat with the model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def requests(prompts: Sequence[list[int]], **sampling_params: Any) -> Wave:
    sampling = GREEDY | sampling_params
    return [{"input_ids": tokens, "sampling_params": sampling} for tokens in prompts]


def start(
    folder: Path,
    waves: Sequence[Wave],
    flags: Sequence[str] = (),
    environ: dict[str, str] | None = None,
    program: Sequence[str] = ("npu_emulation.serve",),
    timeout: float = 280,
) -> tuple[subprocess.CompletedProcess[str], Report | None]:
    """What the process said and, where it served every request, its report."""
    with tempfile.TemporaryDirectory() as temporary:
        asked, report = Path(temporary) / "requests.json", Path(temporary) / "report.json"
        asked.write_text(json.dumps(waves))
        files = ["--requests", str(asked), "--json", str(report)]
        command = [*program, *files, "--model-path", str(folder), *FLAGS, *flags]
        environ = os.environ | (environ or {})
        # torch_npu counts the devices once, and may be left out of the process that asks.
        imported = {DEVICES: _ranks(command), AUTOLOAD: environ.get(AUTOLOAD, "1")}
        process = template(**imported).run(command, environ, timeout)
        return process, Report.from_json(report.read_text()) if report.exists() else None


def _ranks(command: list[str]) -> str:
    sizes = [size for flag, size in pairwise(command) if flag in TP_SIZE]
    return sizes[0] if sizes else "1"


def served(*args: Any, **kwargs: Any) -> Report:
    process, report = start(*args, **kwargs)
    if report is None:
        raise AssertionError(
            f"the server stopped:\n{process.stdout[-2000:]}{process.stderr[-6000:]}"
        )
    assert report.left_undone == []
    assert report.prefill is None or report.prefill.left_undone == []
    return report
