"""Products that no operator has the arithmetic of: inputs are rounded by the definition, and floats
are multiplied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_ascend.quantization.formats import FP8_E4M3, INT8
from sglang_ascend.quantization.transforms.rotation import rotated
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight


def is_emulated(weight: QuantizedWeight) -> bool:
    """Whether no operator here has the arithmetic of its formats, so that floats are multiplied."""
    rule, form = weight.input_rule, weight.number_format
    if not form.is_integer and form is not FP8_E4M3:
        return True
    if rule.kind != InputKind.PER_TOKEN or rule.number_format is FP8_E4M3:
        return False
    return rule.number_format is not INT8 or rule.group_size is not None


def emulated(
    weight: QuantizedWeight, dtype: torch.dtype | None
) -> tuple[Callable[..., Tensor], Tensor]:
    """The values themselves, multiplied as floats; inputs are rounded by the definition."""
    rule, values = weight.input_rule, weight.factor()
    values = values if dtype is None else values.to(dtype)

    def product(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(rounded_inputs(x, rule).to(values.dtype), values, bias)

    return product, values


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
