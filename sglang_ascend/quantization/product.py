"""Which operator of `ops/quantized` multiplies with a quantized weight, or one per group.

On the meta device a weight has the operators of an NPU, and what they hold has shapes only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_ascend.ops import experts
from sglang_ascend.ops import quantized as ops
from sglang_ascend.ops.dispatch import REFERENCE, Op
from sglang_ascend.ops.quantized.weights import PreparedCodes
from sglang_ascend.quantization.emulated import emulated, is_emulated, rounded_inputs
from sglang_ascend.quantization.formats import FP8_E4M3, INT4, INT8
from sglang_ascend.quantization.layouts.modelslim import fold_static
from sglang_ascend.quantization.transforms.rotation import rotated
from sglang_ascend.quantization.weight import InputKind, QuantizedWeight, dense

# Modules that SGLang's models multiply with themselves: MLA absorbs kv_b_proj into its queries, and
# the others are no linear layers of SGLang's. Their weights are decoded when they are read.
DECODED = ("kv_b_proj", "input_proj", "eh_proj", "gate", "embed_tokens", "head")

# (x [..., in], bias [out] or None) -> [..., out]
Product = Callable[..., Tensor]
# (rows [rows, in] group by group, counts int64 [groups]) -> [rows, out]
GroupedProduct = Callable[[Tensor, Tensor], Tensor]

# What `cpu_body` says of a format that no operator multiplies.
AS_FLOATS = "decoded to float"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """What a server keeps of quantized weights; as floats it keeps their values."""

    num_bytes: int
    is_float: bool

    @classmethod
    def of(cls, kept: Tensor | PreparedCodes) -> Held:
        is_float = isinstance(kept, Tensor)
        return cls(kept.nbytes if is_float else kept.num_bytes, is_float)


def is_decoded(module: str) -> bool:
    return module.rpartition(".")[2] in DECODED


def prepare(
    weight: QuantizedWeight, dtype: torch.dtype | None = None, *, needs_body: bool = False
) -> Product:
    """The product `(x, bias=None) -> y` with `weight`, prepared once.

    `dtype` is that of x, where it is known. An operator's definition may wait for the device: with
    `needs_body` a weight that no body multiplies is multiplied as floats of `dtype`.

    `bias` is a float tensor beside the weight. One that the layout folded into its integers is in
    the product already, and lies beside them a second time: then `bias` is not added.

    Raises:
        ValueError: no operator has this combination of weight and input.
    """
    product, kept = _prepared(weight, dtype, needs_body)
    _say_decoded(weight, kept)
    return product


def held(
    weight: QuantizedWeight, dtype: torch.dtype | None = None, *, needs_body: bool = False
) -> Held:
    """What `prepare` keeps of `weight`.

    Raises:
        ValueError: as `prepare`.
    """
    return Held.of(_prepared(weight, dtype, needs_body)[1])


def _prepared(
    weight: QuantizedWeight, dtype: torch.dtype | None, needs_body: bool
) -> tuple[Product, Tensor | PreparedCodes]:
    """The product, and all that it keeps."""
    if is_emulated(weight):
        return emulated(weight, dtype)
    weight = _by_rows(weight)
    operator, _, prepared = _operators(weight, weight.codes, weight.scale, weight.zero, dtype)
    x = weight.codes.new_empty(1, weight.shape[1], dtype=dtype)
    if needs_body and not _has_body(operator, x, prepared):
        values = weight.dequantize().to(x.dtype)
        return lambda x, bias=None: torch.nn.functional.linear(x, values, bias), values
    if weight.bias is not None:
        return lambda x, bias=None: operator(x, prepared, None), prepared
    if weight.input_rule.rotated:
        return lambda x, bias=None: operator(rotated(x), prepared, bias), prepared
    return lambda x, bias=None: operator(x, prepared, bias), prepared


def prepare_grouped(
    weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype, *, needs_body: bool = False
) -> GroupedProduct:
    """The product of group i's rows with `weights[i]` ([out, in], all alike), prepared once.

    Args:
        dtype: of the rows. Float weights are multiplied in it, and so is every weight where some
            are float.
        needs_body: as for `prepare`.

    Raises:
        ValueError: quantized weights that differ in their form, or that no operator multiplies.
    """
    product, kept = _prepared_grouped(weights, dtype, needs_body)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) == len(weights):
        _say_decoded(quantized[0], kept)
    return product


def held_grouped(
    weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype, *, needs_body: bool = False
) -> Held:
    """What `prepare_grouped` keeps of `weights`.

    Raises:
        ValueError: as `prepare_grouped`.
    """
    return Held.of(_prepared_grouped(weights, dtype, needs_body)[1])


def _prepared_grouped(
    weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype, needs_body: bool
) -> tuple[GroupedProduct, Tensor | PreparedCodes]:
    quantized = [_by_rows(weight) for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) < len(weights):
        return _of_floats(weights, dtype)
    first = quantized[0]
    if len({(w.block, w.input_rule, w.number_format) for w in quantized}) > 1:
        raise ValueError("experts of one layer are quantized in several ways: quantize them alike.")
    if is_emulated(first):
        product, kept = _of_floats([weight.factor() for weight in quantized], dtype)
        rule = first.input_rule
        return lambda rows, counts: product(rounded_inputs(rows, rule), counts), kept
    for weight in quantized:
        _check_grouped(weight)
    codes = torch.stack([weight.codes for weight in quantized])
    scale = torch.stack([weight.scale for weight in quantized])
    zero = None
    if any(weight.zero is not None for weight in quantized):
        zeros = (torch.zeros_like(w.scale) if w.zero is None else w.zero.float() for w in quantized)
        zero = torch.stack([*zeros])
    _, operator, prepared = _operators(first, codes, scale, zero, dtype)
    x, counts = codes.new_empty(1, codes.shape[2], dtype=dtype), codes.new_empty(len(codes))
    if needs_body and not _has_body(operator, x, prepared, counts):
        return _of_floats([weight.dequantize() for weight in quantized], dtype)
    if first.input_rule.rotated:
        return lambda rows, counts: operator(rotated(rows), prepared, counts), prepared
    return lambda rows, counts: operator(rows, prepared, counts), prepared


def cpu_body(weight: QuantizedWeight, is_expert: bool) -> str:
    """Name of the body of `ops/quantized` that multiplies with `weight` on this CPU.

    Raises:
        ValueError: no operator has this combination of weight and input.
    """
    if is_emulated(weight):
        return AS_FLOATS
    weight = _by_rows(weight)
    x = torch.zeros(1, weight.shape[1], dtype=torch.float32)
    if is_expert:
        _check_grouped(weight)
        zero = None if weight.zero is None else weight.zero[None].float()
        _, operator, prepared = _operators(
            weight, weight.codes[None], weight.scale[None], zero, None
        )
        call = x, prepared, torch.tensor([1])
    else:
        operator, _, prepared = _operators(weight, weight.codes, weight.scale, weight.zero, None)
        call = x, prepared
    return operator.body_of(*call).name


def _check_grouped(weight: QuantizedWeight) -> None:
    """Groups have neither columns in an order of their own nor static inputs."""
    if weight.group_index is not None or weight.input_rule.kind == InputKind.STATIC:
        raise _no_operator(weight)


def _of_floats(
    weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype
) -> tuple[GroupedProduct, Tensor]:
    matrices = torch.stack([dense(weight).to(dtype).T for weight in weights])
    return lambda rows, counts: experts.grouped_matmul(rows, matrices, counts), matrices


def _has_body(operator: Op, x: Tensor, *args: Any) -> bool:
    return operator.body_of(x, *args).name != REFERENCE


def _say_decoded(weight: QuantizedWeight, kept: Tensor | PreparedCodes) -> None:
    """Of formats that have a product, where this device has none of this form."""
    if isinstance(kept, Tensor) and not is_emulated(weight):
        logger.warning(
            "%s weights in blocks of %s are multiplied as floats: this device has no product of "
            "them.",
            weight.number_format.name,
            weight.block,
        )


def _by_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """Integer products have a scale for each row."""
    if weight.number_format.is_integer and weight.block[0] != 1:
        return weight.refined((1, weight.block[1]))
    return weight


def _operators(
    form: QuantizedWeight,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Op, Op, Any]:
    """The operator for one matrix, its grouped form, and what either takes as the weight.

    `codes`, `scale` and `zero` are those of `form`, or of several weights like it, stacked.
    """
    rule, number_format = form.input_rule, form.number_format
    width = min(form.block[1], form.shape[1])
    if number_format is FP8_E4M3:
        input_width = min(rule.group_size or form.shape[1], form.shape[1])
        takes_blocks = rule.number_format is FP8_E4M3 and input_width == width
        fits = rule.kind == InputKind.NONE or (rule.kind == InputKind.PER_TOKEN and takes_blocks)
        if not fits or zero is not None or form.group_index is not None:
            raise _no_operator(form)
        quantizes_input = rule.kind == InputKind.PER_TOKEN
        block = form.block[0], width
        prepared = ops.prepare_block_fp8(codes, scale, block=block, quantizes_input=quantizes_input)
        return ops.block_fp8_linear, ops.grouped_block_fp8_linear, prepared
    bits = max(number_format.bits, INT4.bits)
    if rule.kind == InputKind.NONE:
        index = form.group_index
        prepared = ops.prepare_weight_only(
            codes, scale, zero, bits=bits, group_size=width, group_index=index, dtype=dtype
        )
        return ops.weight_only_linear, ops.grouped_weight_only_linear, prepared
    if zero is not None or form.group_index is not None or rule.number_format is not INT8:
        raise _no_operator(form)
    fold = fold_static(form) if rule.kind == InputKind.STATIC else {}
    scale = fold.pop("deq_scale")[:, None] if fold else scale
    prepared = ops.prepare_integer(codes, scale, bits=bits, group_size=width, **fold)
    return ops.integer_linear, ops.grouped_integer_linear, prepared


def _no_operator(weight: QuantizedWeight) -> ValueError:
    rule = weight.input_rule
    return ValueError(
        f"no operator multiplies {weight.number_format.name} weights in blocks of {weight.block} "
        f"with {rule.kind} {rule.number_format.name} inputs: convert the checkpoint to float32"
    )
