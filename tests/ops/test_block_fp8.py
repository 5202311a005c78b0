"""A product of E4M3 blocks is what float64 makes of the decoded codes, in every body for a CPU.

E4M3 is decoded here from its bits (sign, exponent of bias 7, three bits of mantissa), and rounded
by looking for the nearest of its 253 numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.ops import quantized
from sglang_ascend.ops.dispatch import Op
from sglang_ascend.ops.quantized import fp8

BLOCKS = [(128, 128), (16, 32)]


def bodies(op: Op) -> list[str]:
    return [name for name, body in op._implementations.items() if body.serves("cpu")]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int) -> torch.Tensor:
    return 0.001 + torch.rand(shape, generator=torch.Generator().manual_seed(2))


def number(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


NUMBERS = torch.tensor([float("nan") if b & 127 == 127 else number(b) for b in range(256)]).double()


def drawn(*shape: int) -> torch.Tensor:
    """Every code but NaN, subnormal numbers among them."""
    generator = torch.Generator().manual_seed(1)
    size = torch.randint(127, shape, generator=generator)
    sign = torch.randint(2, shape, generator=generator) * 128
    return (size + sign).to(torch.uint8).view(torch.float8_e4m3fn)


def values_of(codes: torch.Tensor) -> torch.Tensor:
    return NUMBERS[codes.view(torch.uint8).long()]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To the nearest E4M3 number, ties to the even mantissa."""
    found = torch.empty_like(x)
    numbers = NUMBERS[:127]
    for i, value in enumerate(x.abs().flatten().tolist()):
        distance = (numbers - value).abs()
        near = (distance == distance.min()).nonzero().flatten().tolist()
        best = min(near, key=lambda code: code & 1)
        found.view(-1)[i] = numbers[best] * (1 if x.flatten()[i] >= 0 else -1)
    return found


def decoded(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    out, width = codes.shape
    rows, columns = torch.arange(out) // block[0], torch.arange(width) // block[1]
    return values_of(codes) * scale.double()[rows][:, columns]


def as_e4m3(x: torch.Tensor, width: int) -> torch.Tensor:
    """What the input is worth after its own quantization, in float64."""
    parts = []
    for part in x.float().split(width, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / 448
        divisor = torch.where(scale == 0, 1.0, scale)
        parts.append(rounded((part / divisor).double()) * scale.double())
    return torch.cat(parts, dim=-1)


def agrees(found: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> bool:
    exact = x.double() @ values.T
    of_sums = (x.shape[-1] + 8) * torch.finfo(torch.float32).eps
    bound = of_sums * (x.double().abs() @ values.abs().T)
    bound += torch.finfo(found.dtype).eps / 2 * exact.abs()
    return bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("width", [128, 32])
def test_a_block_of_a_row_is_rounded_to_the_nearest_number(width):
    x = noise(3, 200) * torch.logspace(-4, 3, 200)
    x[1, :width] = 0
    codes, scale = fp8.quantize_blocks(x, width)
    wide = scale.repeat_interleave(width, dim=1)[:, :200].double()
    assert_close(values_of(codes) * wide, as_e4m3(x, width), rtol=0, atol=0)
    assert not scale[1, 0] and codes.float().abs().max() == 448


@pytest.mark.parametrize("body", bodies(quantized.block_fp8_linear))
@pytest.mark.parametrize("quantizes_input", [True, False], ids=["e4m3-input", "float-input"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 7, 66])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_the_product_with_the_decoded_blocks(body, quantizes_input, block, rows, dtype):
    x, codes = noise(rows, 200).to(dtype), drawn(40, 200)
    scale = scales(-(-40 // block[0]), -(-200 // block[1]))
    options = {"block": block, "quantizes_input": quantizes_input}
    weight = quantized.prepare_block_fp8(codes, scale, **options)
    bias = noise(40, seed=5)
    found = quantized.block_fp8_linear.implementation(body)(x, weight, bias)
    given = as_e4m3(x, block[1]) if quantizes_input else x.double()
    given = torch.cat([given, torch.ones(rows, 1)], dim=1)
    values = torch.cat([decoded(codes, scale, block), bias.double()[:, None]], dim=1)
    assert found.dtype == dtype and agrees(found, given, values)
    other = torch.cat([decoded(codes, scale.roll(1, 1), block), values[:, -1:]], dim=1)
    assert not agrees(found, given, other)
    if quantizes_input and dtype == torch.float32:
        assert not agrees(found, torch.cat([x, torch.ones(rows, 1)], dim=1), values)


@pytest.mark.parametrize("body", bodies(quantized.grouped_block_fp8_linear))
@pytest.mark.parametrize("quantizes_input", [True, False], ids=["e4m3-input", "float-input"])
def test_the_rows_of_each_expert_meet_its_own_matrix(body, quantizes_input):
    x, codes, scale = noise(13, 48), drawn(4, 6, 48), scales(4, 1, 2)
    counts = torch.tensor([5, 0, 7, 1])
    options = {"block": (16, 32), "quantizes_input": quantizes_input}
    weight = quantized.prepare_block_fp8(codes, scale, **options)
    found = quantized.grouped_block_fp8_linear.implementation(body)(x, weight, counts)
    given = as_e4m3(x, 32) if quantizes_input else x
    values = [decoded(*matrix, (16, 32)) for matrix in zip(codes, scale, strict=True)]
    parts = zip(found.split(counts.tolist()), given.split(counts.tolist()), values, strict=True)
    assert all(agrees(*part) for part in parts)
    astray = zip(found.split([5, 1, 6, 1]), given.split([5, 1, 6, 1]), values, strict=True)
    assert not all(agrees(*part) for part in astray)


@pytest.mark.parametrize(
    ("codes", "scale", "message"),
    [
        (torch.zeros(2, 3), scales(1, 1), "codes are float8_e4m3fn"),
        (drawn(2, 3), scales(1, 2), "scales are float32"),
        (drawn(2, 130), scales(1, 1), "scales are float32"),
    ],
)
def test_what_does_not_fit_is_refused(codes, scale, message):
    with pytest.raises(ValueError, match=message):
        quantized.prepare_block_fp8(codes, scale)
