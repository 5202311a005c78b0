"""Types of ModelSlim's files whose codes are floating-point numbers of few bits.

| type | `weight` | `weight_scale` |
|---|---|---|
| W8A8_MXFP8, W8A16_MXFP8, W8A16_MXFP8_E5M2 | float8 [out, in] | E8M0, uint8 [out, in / 32] |
| W4A4_MXFP4, W4A8_MXFP, W4A16_MXFP4 | two E2M1 in a byte [out, in / 2] | the same |
| W8A8_HIF8, W8A16_HIF8 | a byte each | float32 [out, groups] |
| W4A16_NF4 | two in a byte | float32 [out, groups] |
| W4A4_HIF4, W4A16_HIF4 | two in a byte | int32 [out, in / 64]: E6M2, 8 and 16 bits |

The first of two lies in the low nibble. Those with _MXFP8 or _MXFP4 behind equal inputs, and
W4A8_MXFP, are msmodelslim's names; the others are this package's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ascend.quantization.formats import (
    HIF4,
    HIF8,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NF4,
    NumberFormat,
)
from sglang_ascend.quantization.formats.hif4 import COLUMNS, SCALES
from sglang_ascend.quantization.layouts.base import ModuleTensors, Scheme
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputKind, InputRule, QuantizedWeight

TENSORS = ("weight", "weight_scale")
E8M0_ONE, E6M2_ONE = 127, 48  # the codes of exponent 0
NO_NUMBER = 0xFF  # of either


def inputs_in(form: NumberFormat) -> InputRule:
    """Inputs in `form`, scaled at run time in its own groups or by the whole token."""
    return InputRule(InputKind.PER_TOKEN, form, form.group_size)


SCHEMES = {
    name: Scheme(name, form, TENSORS, input_rule=rule)
    for name, form, rule in (
        ("W8A8_MXFP8", MXFP8, inputs_in(MXFP8)),
        ("W4A4_MXFP4", MXFP4, inputs_in(MXFP4)),
        ("W4A8_MXFP", MXFP4, inputs_in(MXFP8)),
        ("W8A8_HIF8", HIF8, inputs_in(HIF8)),
        ("W4A4_HIF4", HIF4, inputs_in(HIF4)),
        ("W8A16_MXFP8", MXFP8, WEIGHT_ONLY),
        ("W8A16_MXFP8_E5M2", MXFP8_E5M2, WEIGHT_ONLY),
        ("W4A16_MXFP4", MXFP4, WEIGHT_ONLY),
        ("W8A16_HIF8", HIF8, WEIGHT_ONLY),
        ("W4A16_HIF4", HIF4, WEIGHT_ONLY),
        ("W4A16_NF4", NF4, WEIGHT_ONLY),
    )
}


def read_codes(held: ModuleTensors, form: NumberFormat) -> Tensor:
    """[out, in]

    Raises:
        CheckpointError: they are missing, of another dtype, or no numbers of `form`.
    """
    if form.bits == 8:
        return held.codes("weight", form)
    packed = held.take("weight", (torch.uint8,), None, None)
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)


def read_scale(held: ModuleTensors, form: NumberFormat, shape: torch.Size) -> Tensor:
    """float32 [out, groups] for codes of `shape` [out, in].

    Raises:
        CheckpointError: it is missing, of another shape, or holds no finite number above 0.
    """
    rows, columns = shape
    if form.group_size is None:
        return held.scale("weight_scale", rows, None)
    if form.power_of_two:
        packed = held.take("weight_scale", (torch.uint8,), rows, columns // form.group_size)
        scale = torch.exp2(packed.double() - E8M0_ONE).masked_fill(packed == NO_NUMBER, torch.nan)
        return held.positive("weight_scale", scale.float())
    packed = held.take("weight_scale", (torch.int32,), rows, columns // COLUMNS)
    return held.positive("weight_scale", _unit_scales(packed))


def tensors_of(weight: QuantizedWeight) -> dict[str, Tensor]:
    """`weight` and `weight_scale` as a file holds them; the inverse of the two above."""
    form, codes, scale = weight.number_format, weight.codes, weight.scale
    if form.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    if form.power_of_two:
        scale = (torch.frexp(scale).exponent - 1 + E8M0_ONE).to(torch.uint8)
    elif form is HIF4:
        scale = _packed_units(scale)
    return {"weight": codes, "weight_scale": scale}


def _unit_scales(packed: Tensor) -> Tensor:
    """HiF4's scales, float32 [out, 16 units], from words: E6M2 in the low byte, a bit for each 8
    columns above it, a bit for each 4 columns above those."""
    code = packed & 0xFF
    first = torch.exp2((code >> 2).double() - E6M2_ONE) * (1 + (code & 3) / 4)
    first = first.masked_fill(code == NO_NUMBER, torch.nan)[..., None]
    second = _bits(packed, 8, SCALES // 2).repeat_interleave(2, -1)
    return (first * (1 + second) * (1 + _bits(packed, 16, SCALES))).flatten(1).float()


def _packed_units(scale: Tensor) -> Tensor:
    """The inverse: the least scale of a unit is its first, and doubling goes to the pair before it
    goes to one of both."""
    units = scale.double().unflatten(-1, (-1, SCALES // 2, 2))
    first = units.amin((-2, -1), keepdim=True)
    second = units.amax(-1, keepdim=True) >= 4 * first
    third = units >= 2 * first * (1 + second.double())
    power = torch.frexp(first).exponent - 1
    code = (power + E6M2_ONE) * 4 + (first * torch.exp2(2.0 - power) - 4).int()
    places = torch.arange(SCALES)
    words = (
        code.flatten(-3).int()
        | (second.flatten(-2).int() << (places[: SCALES // 2] + 8)).sum(-1)
        | (third.flatten(-2).int() << (places + 16)).sum(-1)
    )
    return words.to(torch.int32)


def _bits(words: Tensor, start: int, count: int) -> Tensor:
    return words[..., None] >> torch.arange(start, start + count, dtype=torch.int32) & 1
