"""Which operator of `ops/quantized` multiplies with a quantized weight, or one per group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_ascend.ops import experts
from sglang_ascend.ops import quantized as ops
from sglang_ascend.ops.dispatch import REFERENCE, Op
from sglang_ascend.quantization.formats import FP8_E4M3, INT4, INT8
from sglang_ascend.quantization.transforms.rotation import rotated
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight, dense

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
    if _is_emulated(weight):
        return _emulated(weight, dtype)
    weight = _by_rows(weight)
    operator, _, prepared = _operators(weight, weight.codes, weight.scale, weight.zero, dtype)
    x = weight.codes.new_empty(1, weight.shape[1], dtype=dtype)
    if needs_body and not _has_body(operator, x, prepared):
        dense = _decoded(weight).to(x.dtype)
        return lambda x, bias=None: torch.nn.functional.linear(x, dense, bias)
    if weight.bias is not None:
        return lambda x, bias=None: operator(x, prepared, None)
    if weight.input_rule.rotated:
        return lambda x, bias=None: operator(rotated(x), prepared, bias)
    return lambda x, bias=None: operator(x, prepared, bias)


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
    quantized = [_by_rows(weight) for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) < len(weights):
        return _of_floats(weights, dtype)
    first = quantized[0]
    if len({(w.block, w.input_rule, w.number_format) for w in quantized}) > 1:
        raise ValueError("experts of one layer are quantized in several ways: quantize them alike.")
    if _is_emulated(first):
        product = _of_floats([weight.factor() for weight in quantized], dtype)
        return lambda rows, counts: product(rounded_inputs(rows, first.input_rule), counts)
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
        return _of_floats([_decoded(weight) for weight in quantized], dtype)
    if first.input_rule.rotated:
        return lambda rows, counts: operator(rotated(rows), prepared, counts)
    return lambda rows, counts: operator(rows, prepared, counts)


def prepared_bytes(weight: QuantizedWeight) -> int:
    """What `prepare` keeps of `weight`."""
    if _is_emulated(weight):
        return 4 * weight.codes.numel()
    weight = _by_rows(weight)
    return _operators(weight, weight.codes, weight.scale, weight.zero, None)[2].num_bytes


def cpu_body(weight: QuantizedWeight, is_expert: bool) -> str:
    """Name of the body of `ops/quantized` that multiplies with `weight` on this CPU.

    Raises:
        ValueError: no operator has this combination of weight and input.
    """
    if _is_emulated(weight):
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


def _is_emulated(weight: QuantizedWeight) -> bool:
    """Whether no operator here has the arithmetic of its formats, so that floats are multiplied."""
    rule, form = weight.input_rule, weight.number_format
    if not form.is_integer and form is not FP8_E4M3:
        return True
    if rule.kind != InputKind.PER_TOKEN or rule.number_format is FP8_E4M3:
        return False
    return rule.number_format is not INT8 or rule.group_size is not None


def _emulated(weight: QuantizedWeight, dtype: torch.dtype | None) -> Product:
    """The values themselves, multiplied as floats; inputs are rounded by the definition."""
    rule, values = weight.input_rule, weight.factor()
    values = values if dtype is None else values.to(dtype)

    def product(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(rounded_inputs(x, rule).to(values.dtype), values, bias)

    return product


def rounded_inputs(x: Tensor, rule: InputRule) -> Tensor:
    """`x`, rotated if `rule` says so, at the nearest of its numbers; each group of columns of a row
    has its own scale, unless the rule has one for all."""
    if rule.kind == InputKind.NONE:
        return x
    form, columns = rule.number_format, x.shape[-1]
    if rule.scale is not None and rule.offset is not None:
        codes = form.encode(x.float() / rule.scale + rule.offset)
        return ((form.decode(codes) - rule.offset) * rule.scale).to(x.dtype)
    x = rotated(x) if rule.rotated else x
    width = rule.group_size or columns
    groups = torch.nn.functional.pad(x.float(), (0, -columns % width)).unflatten(-1, (-1, width))
    scale = form.scale(groups.abs().amax(-1))[..., None]
    held = form.decode(form.encode(groups / scale)) * scale
    return held.flatten(-2)[..., :columns].to(x.dtype)


def _check_grouped(weight: QuantizedWeight) -> None:
    """Groups have neither columns in an order of their own nor static inputs."""
    if weight.group_index is not None or weight.input_rule.kind == InputKind.STATIC:
        raise _no_operator(weight)


def _of_floats(weights: Sequence[QuantizedWeight | Tensor], dtype: torch.dtype) -> GroupedProduct:
    matrices = torch.stack([dense(weight).to(dtype).T for weight in weights])
    return lambda rows, counts: experts.grouped_matmul(rows, matrices, counts)


def _has_body(operator: Op, x: Tensor, *args: Any) -> bool:
    return operator.body_of(x, *args).name != REFERENCE


def _decoded(weight: QuantizedWeight) -> Tensor:
    logger.warning(
        "%s weights in blocks of %s are multiplied as floats: this device has no product of them.",
        weight.number_format.name,
        weight.block,
    )
    return weight.dequantize()


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
    fold = _static_fold(form) if rule.kind == InputKind.STATIC else {"scale": scale}
    prepared = ops.prepare_integer(codes, bits=bits, group_size=width, **fold)
    return ops.integer_linear, ops.grouped_integer_linear, prepared


def _static_fold(weight: QuantizedWeight) -> dict[str, Tensor]:
    """ModelSlim's: y = (q W^T + quant_bias) * deq_scale with deq_scale = weight scale * input scale
    and quant_bias = round(bias / deq_scale - offset * row sums of W)."""
    rule = weight.input_rule
    input_scale, offset = weight.scale.new_tensor([[rule.scale], [rule.offset]])
    deq_scale = weight.scale * input_scale
    bias = torch.zeros_like(deq_scale[:, 0]) if weight.bias is None else weight.bias
    # In float64, which not every device has.
    units = weight.codes.sum(1, dtype=torch.int64).cpu() * offset.cpu().double()
    quant_bias = (bias.cpu().double() / deq_scale[:, 0].cpu() - units).round().to(torch.int32)
    return {
        "scale": deq_scale,
        "input_scale": input_scale,
        "input_offset": offset,
        "quant_bias": quant_bias.to(deq_scale.device),
    }


def _no_operator(weight: QuantizedWeight) -> ValueError:
    rule = weight.input_rule
    return ValueError(
        f"no operator multiplies {weight.number_format.name} weights in blocks of {weight.block} "
        f"with {rule.kind} {rule.number_format.name} inputs: convert the checkpoint to float32"
    )
