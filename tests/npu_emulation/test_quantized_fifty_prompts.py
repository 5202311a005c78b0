"""Int8 and int4 nano-deepseek with MTP on the emulated NPU: 50 prompts, by this package's methods
and by SGLang's own `modelslim`; the tokens are transformers' over the same integers.

A step waits as the float one does, and launches for it no more than one quantization for each
product that has a quantized weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_oracle import QuantizedOracle
from safetensors.torch import load_file, save_file
from serving.quantized_checkpoints import write_quantized

from npu_emulation.mtp_runs import (
    MTP,
    SHORT_CONTEXT,
    decodes,
    served_by_mtp,
    tokens_per_step,
)
from npu_emulation.report import LAST, WARM_UP
from npu_emulation.sglang_runs import EAGER, FUSED_ATTENTION, chat_prompts, requests, start
from npu_emulation.test_mtp import DEEPSEEK, QUESTIONS
from npu_emulation.test_mtp_fifty_prompts import (
    MAX_SECONDS,
    MODES,
    NUM_PROMPTS,
    NUM_TOKENS,
    prompts_of,
)
from sglang_ascend import env
from sglang_ascend.models.catalog import model_path

pytestmark = pytest.mark.timeout(MAX_SECONDS + 600)

OURS: tuple[str, ...] = ()
IN_TREE = ("--quantization", "modelslim")
PATHS = {"ours": OURS, "modelslim": IN_TREE}
CHECKPOINTS: dict[str, tuple[str, bool]] = {  # layout, and whether the MTP layer has it too
    "int8 + int8": ("W8A8_DYNAMIC", True),
    "int8 + float": ("W8A8_DYNAMIC", False),
    "int4 experts": ("W4A8", True),
}
PARTS_OF_DOWN = 16  # of the sums beside int4 that msModelSlim writes, and SGLang's own reads
# What test_mtp.py finds of the float step: its results are waited for, nothing else.
FLOAT_STEP = {"stream_syncs": 0, "event_syncs": 1, "h2d": 0, "d2h": 0, "graph_replays": 2}
PRODUCTS = ("aclnnQuantMatmul", "aclnnGroupedMatmul")
Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def nano() -> Path:
    return model_path("nano-deepseek")


@pytest.fixture(scope="module")
def checkpoint(nano, tmp_path_factory) -> Write:
    folder = tmp_path_factory.mktemp("quantized")

    def write(name: str) -> Path:
        path, (layout, mtp) = folder / name, CHECKPOINTS[name]
        if not path.exists():
            in_parts(write_quantized(nano, path, layout, mtp=mtp) / "model.safetensors")
        return path

    return write


def in_parts(file: Path) -> None:
    """The sums beside down_proj's codes [out, 1] as [out, parts]: all in the first."""
    tensors = load_file(file)
    for name, sums in tensors.items():
        if name.endswith("down_proj.scale_bias"):
            tensors[name] = torch.nn.functional.pad(sums, (0, PARTS_OF_DOWN - sums.shape[1]))
    save_file(tensors, file)


def cases() -> list:
    """Every combination that serves; the first of each path is not slow."""
    found = []
    for path, mode, name in [(p, m, n) for p in PATHS for m in MODES for n in CHECKPOINTS]:
        if path == "modelslim" and name == "int8 + float":
            continue  # does not start: see below
        quick = mode == "graph" and (path, name) == ("ours", "int4 experts")
        found.append(pytest.param(path, mode, name, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("path", "mode", "name"), cases())
def test_greedy_tokens_are_those_of_the_integers(nano, checkpoint, path, mode, name):
    prompts = prompts_of(nano)
    waves = [requests(prompts, max_new_tokens=NUM_TOKENS)]
    flags, loop = MODES[mode]
    waves += [requests(chat_prompts(nano, QUESTIONS), max_new_tokens=16)]
    report = served_by_mtp(checkpoint(name), waves, *flags, *PATHS[path], timeout=MAX_SECONDS)
    assert report.names.items() >= (DEEPSEEK | {"scheduler_loop": loop}).items()
    if mode == "graph":
        step = report.steady(1)
        assert step.num_alike == step.num_iterations
        assert {wait: step.calls.get(wait, 0) for wait in FLOAT_STEP} == FLOAT_STEP
    tokens = report.tokens[:NUM_PROMPTS]
    oracle = QuantizedOracle(nano, int4_experts=name == "int4 experts")
    said = oracle.summary(prompts, tokens)
    print(f"{path}, {mode}, {name}: {said}; {tokens_per_step(report):.2f} tokens a step")
    oracle.check_greedy(prompts, tokens)
    with pytest.raises(AssertionError):
        oracle.with_scales_off_by_one_row().check_greedy(prompts, tokens)


@pytest.fixture(scope="module")
def launched_for_floats(nano) -> Counter[str]:
    return launched_for_a_step(nano)


def launched_for_a_step(folder: Path, *flags: str) -> Counter[str]:
    """torch_npu's launches by name, of a steady step without graphs."""
    prompts = chat_prompts(folder, QUESTIONS)
    report = served_by_mtp(folder, [requests(prompts, max_new_tokens=16)], *EAGER, *flags)
    full = [turn for turn in decodes(report, 0) if turn.num_requests == len(prompts)]
    steps = {tuple(sorted(turn.launched)) for turn in full[WARM_UP:LAST]}
    assert len(steps) == 1
    return Counter(*steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8 + int8", "int4 experts"])
@pytest.mark.parametrize("path", PATHS)
def test_a_product_costs_one_launch_more_at_most(checkpoint, launched_for_floats, path, name):
    launched = launched_for_a_step(checkpoint(name), *PATHS[path])
    num_products = sum(n for kernel, n in launched.items() if kernel.startswith(PRODUCTS))
    more = launched.total() - launched_for_floats.total()
    print(f"{path}, {name}: {num_products} products of codes, {more} launches more than in float")
    assert 0 < more <= num_products
    # SGLang's own experts quantize in their activation.
    assert any("DequantSwiglu" in kernel for kernel in launched) == (path == "modelslim")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "hooks", "said"),
    [
        # Without a flag SGLang gives a draft no method: int8 meets a model of bfloat16.
        ("int8 + int8", OURS, "required", "KeyError: 'model.decoder."),
        # With it, it has no method for a float layer of experts.
        ("int8 + float", IN_TREE, "", "Unsupported ModelSlim MoE schemes"),
    ],
)
def test_modelslim_alone_does_not_start(nano, checkpoint, name, flags, hooks, said):
    process, report = start(
        checkpoint(name),
        [requests(chat_prompts(nano, QUESTIONS))],
        (*MTP, *SHORT_CONTEXT, *EAGER, *flags),
        FUSED_ATTENTION | {env.HOOKS.name: hooks},
    )
    assert report is None and process.returncode != 0
    assert said in process.stderr
