"""50 prompts give the CPU's greedy tokens on the emulated NPU: two models, by graphs and without.

The CPU's are those of transformers' own model in bfloat16: it shares no code with the served path,
and with its float32 logits a tie can be told from a mistake (greedy_oracle.py).
Prompts are questions that training never saw, conversations, slices of text and noise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from greedy_oracle import Oracle
from serving.serving_prompts import lossless_mix
from transformers import AutoTokenizer

from npu_emulation.mtp_runs import served_by_mtp, tokens_per_step
from npu_emulation.quick import slow_but
from npu_emulation.sglang_runs import EAGER, requests
from npu_emulation.test_mtp import CLASSES, DEEPSEEK
from sglang_ascend.models.catalog import model_path

NUM_PROMPTS, NUM_TOKENS = 50, 10
LONGEST = 240  # of a context of 256
HELD_OUT = sorted((Path(__file__).parents[1] / "data").glob("heldout_*.json"))
MIMO = CLASSES | {
    "model": "MiMoForCausalLM",
    "draft_model": "MiMoMTP",
    "pool": "NPUMHATokenToKVPool",
}
MODELS = {"nano-deepseek": DEEPSEEK, "smollm2-mtp": MIMO}
MODES = {"graph": (("--cuda-graph-bs-decode", "8"), "overlap"), "eager": (EAGER, "normal")}
MAX_SECONDS = 2 * 3600  # of a server: kernels are interpreted
pytestmark = pytest.mark.timeout(MAX_SECONDS + 600)


def prompts_of(folder: Path) -> list[list[int]]:
    held_out = {
        file.stem: [row["prompt"] for row in json.loads(file.read_text())] for file in HELD_OUT
    }
    mix = lossless_mix(AutoTokenizer.from_pretrained(folder), held_out, 2 * NUM_PROMPTS)
    # Every other one, so that no kind is left out.
    return [tokens for tokens in mix[::2] + mix[1::2] if len(tokens) <= LONGEST][:NUM_PROMPTS]


@pytest.mark.parametrize("mode", slow_but("graph", MODES))
@pytest.mark.parametrize(
    "model", ["nano-deepseek", pytest.param("smollm2-mtp", marks=pytest.mark.slow)]
)
def test_greedy_tokens_are_the_cpu_s(model, mode):
    folder = model_path(model)
    prompts = prompts_of(folder)
    assert len(prompts) == NUM_PROMPTS
    waves = [requests(prompts, max_new_tokens=NUM_TOKENS)]
    flags, scheduler_loop = MODES[mode]
    report = served_by_mtp(folder, waves, *flags, timeout=MAX_SECONDS)
    assert report.names.items() >= (MODELS[model] | {"scheduler_loop": scheduler_loop}).items()
    replayed = ["graph_replays" in turn.calls for turn in report.iterations]
    assert any(replayed) == (mode == "graph")
    oracle = Oracle(folder)
    said = oracle.summary(prompts, report.tokens)
    print(f"{model}, {mode}: {said}; {tokens_per_step(report):.2f} tokens a step")
    oracle.check_greedy(prompts, report.tokens)
