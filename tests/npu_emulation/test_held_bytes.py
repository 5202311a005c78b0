"""What an NPU holds of weights is known without one: of a weight on the meta device, and of a model
from its config.json (`plan-memory`).

Compared with the storages that a product on the emulated NPU keeps alive, and with those of all
modules of a server.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from npu_emulation.held_weights import storages_of
from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT
from npu_emulation.quick import slow_but
from npu_emulation.sglang_runs import EAGER, FUSED_ATTENTION, requests, start
from sglang_ascend.checkpoint.config import read_config
from sglang_ascend.memory.plan import Deployment, plan
from sglang_ascend.memory.weights import FLOAT, Weights
from sglang_ascend.models.catalog import model_path
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.formats import (
    FP8_E4M3,
    HIF4,
    HIF8,
    INT2,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NF4,
    NumberFormat,
)
from sglang_ascend.quantization.product import held, held_grouped, prepare, prepare_grouped
from sglang_ascend.quantization.recipe import read_recipe
from sglang_ascend.quantization.solve import Grid, hqq, rtn
from sglang_ascend.quantization.weight import (
    PER_TOKEN,
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
)

OUT, WIDTH, EXPERTS = 96, 192, 3
META, NPU = torch.device("meta"), torch.device("npu")
STATIC = InputRule(InputKind.STATIC, INT8, None, 0.03125, 7.0)
ROTATED = replace(PER_TOKEN, rotated=True)
INT4_INPUTS = replace(PER_TOKEN, number_format=INT4)
FLOATS, CODES = True, False


def rounded(form: NumberFormat, rule: InputRule, columns: int | None = None, **options: Any):
    rows = options.pop("rows", OUT)
    block = (options.pop("block_rows", 1), columns)
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return rtn(values, Grid(form, block, **options), rule)


def per_token(form: NumberFormat, group_size: int | None = None) -> InputRule:
    return InputRule(InputKind.PER_TOKEN, form, group_size)


def with_order(weight: QuantizedWeight) -> QuantizedWeight:
    index = torch.arange(WIDTH) % weight.scale.shape[1]
    return replace(weight, group_index=index)


# By name a weight, and whether it is held as floats there.
LINEARS = {
    "w8a8": (rounded(INT8, PER_TOKEN), CODES),
    "w8a8 rotated": (rounded(INT8, ROTATED), CODES),
    "w8a8 static": (rounded(INT8, STATIC), CODES),
    "w8a8 in groups": (rounded(INT8, PER_TOKEN, 32), FLOATS),
    "w8a8, no whole tiles": (rounded(INT8, PER_TOKEN, rows=20), CODES),
    "w4a8": (rounded(INT4, PER_TOKEN), CODES),
    "w4a8, rows that eight does not divide": (rounded(INT4, PER_TOKEN, rows=20), CODES),
    "w4a8 in groups": (rounded(INT4, PER_TOKEN, 32), FLOATS),
    "w4a4": (rounded(INT4, INT4_INPUTS), FLOATS),
    "w4a4 rotated": (rounded(INT4, replace(INT4_INPUTS, rotated=True)), FLOATS),
    "w8a16": (rounded(INT8, WEIGHT_ONLY), CODES),
    "w8a16 in groups": (rounded(INT8, WEIGHT_ONLY, 32), CODES),
    "w8a16 with zeros": (rounded(INT8, WEIGHT_ONLY, symmetric=False), CODES),
    "w4a16": (rounded(INT4, WEIGHT_ONLY, 32), CODES),
    "w4a16 with zeros": (rounded(INT4, WEIGHT_ONLY, 32, symmetric=False), CODES),
    "w4a16 with real zeros": (hqq(torch.randn(OUT, WIDTH), Grid(INT4, (1, 64), False)), CODES),
    "w4a16 act-order": (with_order(rounded(INT4, WEIGHT_ONLY, 32)), CODES),
    "w4a16, rows that eight does not divide": (rounded(INT4, WEIGHT_ONLY, 32, rows=20), FLOATS),
    "w4a16 in groups of 16": (rounded(INT4, WEIGHT_ONLY, 16), FLOATS),
    "w2a16": (rounded(INT2, WEIGHT_ONLY, 64), CODES),
    "fp8": (rounded(FP8_E4M3, per_token(FP8_E4M3, 128), 128, block_rows=128), FLOATS),
    "fp8 weights": (rounded(FP8_E4M3, WEIGHT_ONLY), FLOATS),
    "hif8": (rounded(HIF8, per_token(HIF8)), FLOATS),
    "hif4": (rounded(HIF4, WEIGHT_ONLY, 4), FLOATS),
    "mxfp8": (rounded(MXFP8, per_token(MXFP8, 32), 32), FLOATS),
    "mxfp4": (rounded(MXFP4, per_token(MXFP8, 32), 32), FLOATS),
    "nf4": (rounded(NF4, WEIGHT_ONLY, 64), FLOATS),
}
# What a layer of experts holds otherwise than one matrix.
GROUPED = {"w4a8, rows that eight does not divide": FLOATS, "w8a16 in groups": FLOATS}
NOT_GROUPED = ("w8a8 static", "w4a16 act-order")
EXPERTS_OF = [name for name in LINEARS if name not in NOT_GROUPED]


def stored(product: Any) -> int:
    return sum(storages_of(product).values())


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_holds_what_is_counted_without_a_device(numerics, name):
    weight, is_float = LINEARS[name]
    counted = held(shapes_of(weight), torch.bfloat16, needs_body=True)
    product = prepare(weight.to(NPU), torch.bfloat16, needs_body=True)
    assert counted.num_bytes == stored(product)
    assert counted.is_float == is_float == (stored(product) == 2 * weight.codes.numel())


@pytest.mark.parametrize("name", EXPERTS_OF)
def test_experts_hold_what_is_counted_without_a_device(numerics, name):
    weight, is_float = LINEARS[name]
    is_float = GROUPED.get(name, is_float)
    counted = held_grouped([shapes_of(weight)] * EXPERTS, torch.bfloat16, needs_body=True)
    product = prepare_grouped([weight.to(NPU)] * EXPERTS, torch.bfloat16, needs_body=True)
    assert counted.num_bytes == stored(product)
    floats = 2 * EXPERTS * weight.codes.numel()
    assert counted.is_float == is_float == (stored(product) == floats)


def test_what_a_definition_would_hold_is_not_what_an_npu_holds(numerics):
    """The control: codes where floats are multiplied."""
    weight, _ = LINEARS["fp8"]
    product = prepare(weight.to(NPU), torch.bfloat16, needs_body=True)
    assert held(shapes_of(weight), torch.bfloat16).num_bytes < 0.6 * stored(product)


def shapes_of(weight: QuantizedWeight) -> QuantizedWeight:
    """The order of columns has values, which decide whether groups are alike."""
    return replace(weight.to(META), group_index=weight.group_index)


NANO = model_path("nano-deepseek")
ALONE = {name: (name, 1) for name in (FLOAT, "w8a8-head", "w4a8", "w4a4", "w4a16", "fp8")}
DEPLOYMENTS = ALONE | {f"{name} on 2 ranks": (name, 2) for name in ("w4a8", "w4a16")}


@pytest.mark.parametrize("name", slow_but("w4a4", DEPLOYMENTS))
def test_the_ranks_of_a_server_hold_what_plan_memory_counts(tmp_path, name):
    """Beside tables of rotary positions, which are no weights. The control: the bytes of files."""
    folder, (weights, ranks) = NANO, DEPLOYMENTS[name]
    if weights != FLOAT:
        folder = tmp_path / "quantized"
        Quantization(NANO, read_recipe(weights), folder, num_texts=2).run()
    process, report = start(
        folder,
        [requests([[5, 6, 7]])],
        (*MTP, *SHORT_CONTEXT, *EAGER, "--tp-size", str(ranks)),
        FUSED_ATTENTION,
        program=("npu_emulation.held_weights", str(tmp_path)),
    )
    assert report is not None, process.stderr
    config = read_config(NANO)
    planned = plan(config, Weights.of(config, weights), Deployment(ranks))
    for rank in range(ranks):
        modules = json.loads((tmp_path / f"{rank}.json").read_text())
        held = sum(size for name, size in modules.items() if not name.endswith("rotary_emb"))
        assert held == planned.rank_bytes
        assert held != planned.total_bytes // ranks
