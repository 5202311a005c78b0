"""Linear layers over quantized weights, prepared once: integer, weight-only, E4M3 in blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_ascend.ops.dispatch import (
    CPU,
    Implementation,
    Op,
    npu_body,
    numba_body,
)
from sglang_ascend.ops.quantized import fbgemm, fp8, integer, npu, probe, weight_only
from sglang_ascend.ops.quantized.weights import BlockFP8Weight, IntegerWeight, WeightOnly

__all__ = [
    "BlockFP8Weight",
    "IntegerWeight",
    "WeightOnly",
    "block_fp8_linear",
    "grouped_block_fp8_linear",
    "grouped_integer_linear",
    "grouped_weight_only_linear",
    "integer_linear",
    "prepare_block_fp8",
    "prepare_integer",
    "prepare_weight_only",
    "weight_only_linear",
]

NUMBA_DECODED = "sglang_ascend.ops.quantized.numba_decoded"


def _register_npu(op: Op, function: Callable[..., Any], accepts: Callable[..., bool]) -> None:
    """On an NPU, and on the meta device: a weight that is prepared there has an NPU's tensors, so
    that what one would hold is known without one."""
    op.register(npu_body(function, accepts=accepts))
    op.register(Implementation("shapes of an NPU", function, frozenset({"meta"}), accepts=accepts))


def _numba_integers(name: str) -> Implementation:
    """Where the probe chose Numba's products."""
    is_chosen = partial(probe.is_chosen, "numba")
    return numba_body("sglang_ascend.ops.quantized.numba_integer", name, available=is_chosen)


def _fbgemm(name: str, accepts: str) -> Implementation:
    """Where the probe chose fbgemm's products."""
    function, accepts_call = getattr(fbgemm, name), getattr(fbgemm, accepts)
    return Implementation("fbgemm", function, CPU, partial(probe.is_chosen, "fbgemm"), accepts_call)


prepare_integer = Op("quantized.prepare_integer", integer.prepare_integer)
_register_npu(prepare_integer, npu.prepare_integer, npu.accepts_integer_codes)
prepare_integer.register(_numba_integers("prepare_integer"))
prepare_integer.register(_fbgemm("prepare_integer", "accepts_codes"))
integer_linear = Op("quantized.integer_linear", integer.integer_linear)
_register_npu(integer_linear, npu.integer_linear, npu.accepts_integer)
integer_linear.register(_numba_integers("integer_linear"))
integer_linear.register(_fbgemm("integer_linear", "accepts_rows"))
grouped_integer_linear = Op("quantized.grouped_integer_linear", integer.grouped_integer_linear)
_register_npu(grouped_integer_linear, npu.grouped_integer_linear, npu.accepts_groups)
grouped_integer_linear.register(_numba_integers("grouped_integer_linear"))

prepare_weight_only = Op("quantized.prepare_weight_only", weight_only.prepare_weight_only)
_register_npu(prepare_weight_only, npu.prepare_weight_only, npu.accepts_weight_only_codes)
weight_only_linear = Op("quantized.weight_only_linear", weight_only.weight_only_linear)
_register_npu(weight_only_linear, npu.weight_only_linear, npu.accepts_weight_only)
weight_only_linear.register(numba_body(NUMBA_DECODED, "weight_only_linear"))
grouped_weight_only_linear = Op(
    "quantized.grouped_weight_only_linear", weight_only.grouped_weight_only_linear
)
_register_npu(grouped_weight_only_linear, npu.grouped_weight_only_linear, npu.accepts_weight_only)
grouped_weight_only_linear.register(numba_body(NUMBA_DECODED, "grouped_weight_only_linear"))

prepare_block_fp8 = Op("quantized.prepare_block_fp8", fp8.prepare_block_fp8)
block_fp8_linear = Op("quantized.block_fp8_linear", fp8.block_fp8_linear)
block_fp8_linear.register(numba_body(NUMBA_DECODED, "block_fp8_linear"))
grouped_block_fp8_linear = Op("quantized.grouped_block_fp8_linear", fp8.grouped_block_fp8_linear)
grouped_block_fp8_linear.register(numba_body(NUMBA_DECODED, "grouped_block_fp8_linear"))
