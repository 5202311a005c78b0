"""A code is the nearest number of its format, which the test computes value by value in float64 or
an independent package has; the scales are those of the formats' papers. Each has a control."""

import hashlib
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import norm

from sglang_ascend.quantization.formats import (
    FP8_E4M3,
    HIF4,
    HIF8,
    INT4,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NF4,
    Listed,
)
from sglang_ascend.quantization.solve import Grid, gptq, rtn

# SHA-256 of the 65,536 bytes that en-dtypes 0.0.4 makes of every pattern, in order.
ORACLE = {
    torch.float16: "4e85867f2a96b171c5e3935f544eec7e131d5800b08e053da7b198038f394bf3",
    torch.bfloat16: "bca1768faaec90c66563dedd844a67aa3203a96199637780bc6d22901180d57b",
}
LISTED = (HIF8, HIF4, MXFP4, NF4)


def every(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


@pytest.mark.parametrize("dtype", ORACLE)
def test_hifloat8_of_every_pattern_of_sixteen_bits_is_the_oracles(dtype):
    def digest(codes: torch.Tensor) -> str:
        return hashlib.sha256(codes.numpy().tobytes()).hexdigest()

    assert digest(HIF8.encode(every(dtype), saturate=False)) == ORACLE[dtype]
    other = Listed("even", 8, torch.uint8, HIF8.minimum, HIF8.maximum, numbers=HIF8.numbers)
    assert digest(other.encode(every(dtype))) != ORACLE[dtype]  # the control: ties to even


@pytest.mark.filterwarnings("ignore:invalid value")
def test_hifloat8_is_that_of_the_package_itself():
    import en_dtypes  # of the dev extra; the digests above need no package

    numbers = np.arange(256, dtype=np.uint8).view(en_dtypes.hifloat8).astype(np.float32)
    assert np.array_equal(np.float32(HIF8.numbers), numbers, equal_nan=True)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=generator)
    drawn = bits.to(torch.int32).view(torch.float32)
    ordinary = torch.randn(200_000, generator=generator)
    for values in (every(torch.float16), every(torch.bfloat16), drawn, ordinary):
        expected = values.float().numpy().astype(en_dtypes.hifloat8).view(np.uint8)
        assert np.array_equal(HIF8.encode(values, saturate=False).numpy(), expected)
        finite = np.where(expected & 0x7F == 0x6F, expected - 1, expected)  # 0x6E is the greatest
        assert np.array_equal(HIF8.encode(values).numpy(), finite)
    fours = np.arange(16, dtype=np.uint8).view(en_dtypes.float4_e2m1).astype(np.float32)
    assert np.array_equal(np.float32(MXFP4.numbers), fours)
    found = MXFP4.decode(MXFP4.encode(ordinary * 4)).numpy()
    expected = (ordinary.numpy() * 4).clip(-6, 6).astype(en_dtypes.float4_e2m1).astype(np.float32)
    assert np.array_equal(found, expected)


def nearest(form: Listed, value: float) -> float:
    """Of all finite numbers; the format's own rule between two."""
    numbers = [(number, code) for code, number in enumerate(form.numbers) if math.isfinite(number)]
    numbers = [pair for pair in numbers if math.copysign(1, pair[0]) > 0 or pair[0] < 0]
    best = min(abs(Fraction(number) - Fraction(value)) for number, _ in numbers)
    tied = [pair for pair in numbers if abs(Fraction(pair[0]) - Fraction(value)) == best]
    if form.ties == "away":
        return max(tied, key=lambda pair: abs(pair[0]))[0]
    return min(tied, key=lambda pair: pair[1] % 2)[0]


@pytest.mark.parametrize("form", LISTED, ids=lambda form: form.name)
def test_a_code_is_the_nearest_number_also_in_the_middle_between_two(form):
    ascending = sorted({number for number in form.numbers if math.isfinite(number)})
    middles = [(low + high) / 2 for low, high in pairwise(ascending)]
    drawn = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = [*ascending, *middles, *(drawn * form.maximum).tolist(), 1e9, -1e9, 0.0, -0.0]
    expected = [nearest(form, value) for value in values]
    found = form.decode(form.encode(torch.tensor(values, dtype=torch.float64)))
    singles = torch.tensor(values, dtype=torch.float32)
    of_singles = [nearest(form, value) for value in singles.tolist()]
    assert form.decode(form.encode(singles)).tolist() == np.float32(of_singles).tolist()
    assert np.array_equal(found.numpy(), np.float32(expected))
    codes = form.encode(torch.tensor(ascending, dtype=torch.float64)) ^ 1  # the control
    assert not np.array_equal(form.decode(codes).numpy(), np.float32(ascending))


def test_nf4_is_made_of_quantiles_of_the_normal_distribution():
    """Eight from the upper half, seven from the lower, and zero, scaled to [-1, 1]."""
    end = (1 - 1 / 30 + 1 - 1 / 32) / 2
    upper, lower = norm.ppf(np.linspace(end, 0.5, 9)[:-1]), norm.ppf(np.linspace(end, 0.5, 8)[:-1])
    expected = np.sort([*upper, 0.0, *-lower]) / upper.max()
    assert np.abs(np.float64(NF4.numbers) - expected).max() < 1e-6


@pytest.mark.parametrize("form", [MXFP8, MXFP8_E5M2, MXFP4], ids=lambda form: form.name)
def test_a_microscaled_block_has_the_power_of_two_of_its_largest_value(form):
    """OCP's specification 1.0, 6.3: 2^(floor(log2 max) - the largest exponent of an element)."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) ** 5
    weight[0, :32] = 0
    weight[1, :32] = torch.linspace(-1, 8, 32)  # a largest value that is a power of two
    found = rtn(weight, Grid(form, (1, 32)))
    exponent = {"mxfp8": 8, "mxfp8_e5m2": 15, "mxfp4": 2}[form.name]
    for row in range(6):
        for block in range(2):
            part = weight[row, 32 * block : 32 * block + 32].double()
            largest = float(part.abs().max())
            scale = 2.0 ** (math.floor(math.log2(largest)) - exponent) if largest else 1.0
            assert float(found.scale[row, block]) == scale
            held = (part / scale).clamp(form.minimum, form.maximum)
            own = found.dequantize()[row, 32 * block : 32 * block + 32].double() / scale
            if isinstance(form, Listed):
                assert own.tolist() == [nearest(form, value) for value in held.tolist()]
            else:
                assert torch.equal(own, held.to(form.dtype).double())
    widest = rtn(weight, Grid(FP8_E4M3, (1, 32))).scale  # the control: any scale
    assert not torch.equal(torch.exp2(widest.log2().round()), widest)


def hifloat4(values: list[float]) -> list[float]:
    """One unit of 64 by the paper's three levels, number by number."""
    exact = max(map(abs, values)) / 7
    candidates = [
        2.0**e * (1 + q / 4) for e in range(-48, 16) for q in range(4) if (e, q) != (15, 3)
    ]
    first = min(candidates, key=lambda scale: abs(scale - exact))
    result = []
    for eight in range(0, 64, 8):
        of_eight = max(map(abs, values[eight : eight + 8]))
        second = 2.0 if of_eight >= 4 * first else 1.0
        for four in range(eight, eight + 8, 4):
            part = values[four : four + 4]
            third = 2.0 if max(map(abs, part)) >= 2 * first * second else 1.0
            for value in part:
                quarters = min(7, math.floor(abs(value) / (first * second * third) * 4 + 0.5))
                result.append(math.copysign(quarters / 4 * first * second * third, value))
    return result


def test_hifloat4_has_a_scale_and_two_levels_of_doubling():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 128, generator=generator) ** 3 * torch.logspace(-6, 4, 24)[:, None]
    weight[3] = 0
    found = rtn(weight, Grid(HIF4, (1, 4)))
    for row in range(24):
        for unit in (0, 64):
            expected = hifloat4(weight[row, unit : unit + 64].double().tolist())
            assert found.dequantize()[row, unit : unit + 64].tolist() == expected
    assert found.num_bytes == weight.numel() * 4.5 / 8
    without = HIF4.scale(weight.abs().unflatten(1, (-1, 4)).amax(-1)).unflatten(1, (-1, 16))
    assert {1.0, 2.0, 4.0} == set((without / without.amin(-1, keepdim=True)).flatten().tolist())


def test_the_scales_of_one_hifloat4_unit_are_not_searched_one_by_one():
    weight = torch.randn(4, 64)
    with pytest.raises(ValueError, match="hif4 takes method minmax only"):
        gptq(weight, torch.eye(64), Grid(HIF4, (1, 4)))
    with pytest.raises(ValueError, match="hif4 takes method minmax only"):
        Grid(HIF4, (1, 4)).fit(weight, torch.ones(64))
    with pytest.raises(ValueError, match="hif4 has one scale for 4 columns"):
        Grid(HIF4, (1, 32))


def test_of_normal_weights_each_byte_more_pays():
    """Squared errors; a format that beat another of more bytes would be a wrong one."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))

    def error(grid: Grid) -> float:
        found = rtn(weight, grid)
        return float((found.dequantize() - weight).square().mean())

    fours = {
        "int4": error(Grid(INT4, (1, 64))),
        "nf4": error(Grid(NF4, (1, 64))),
        "hif4": error(Grid(HIF4, (1, 4))),
        "mxfp4": error(Grid(MXFP4, (1, 32))),
    }
    eights = {
        "hif8": error(Grid(HIF8)),
        "fp8": error(Grid(FP8_E4M3)),
        "mxfp8": error(Grid(MXFP8, (1, 32))),
    }
    assert max(eights.values()) < 0.2 * min(fours.values())
    assert fours["nf4"] < fours["int4"] and fours["hif4"] < fours["mxfp4"]
    assert abs(eights["hif8"] / eights["fp8"] - 1) < 0.15
