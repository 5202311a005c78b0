"""Norms, rotation and activation are what their formulas say, in every body that serves on a CPU.

The oracles are the formulas in float64 of the inputs as they are stored; a control with one mistake
in the formula does not pass.
"""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.ops import layers, numba_floats
from sglang_ascend.ops.dispatch import REFERENCE

BODIES = pytest.mark.parametrize("body", [REFERENCE, "numba"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Rows of decode, verify and prefill; widths that no vector divides.
SHAPES = pytest.mark.parametrize("shape", [(1, 576), (4, 7), (130, 33)], ids=str)
# A few float32 roundings; of bfloat16, the one rounding of the result.
TOLERANCES = {
    torch.float32: {"rtol": 2.0**-20, "atol": 2.0**-20},
    torch.bfloat16: {"rtol": 2.0**-8, "atol": 2.0**-20},
}
EPS = 1e-6


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agrees(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(found.double(), exact, **TOLERANCES[found.dtype])


def normed(x: torch.Tensor, weight: torch.Tensor, power: int = 2) -> torch.Tensor:
    mean = (x.abs() ** power).mean(dim=-1, keepdim=True)
    return x / (mean + EPS).sqrt() * weight.double()


@BODIES
@DTYPES
@SHAPES
def test_a_norm_divides_by_the_root_mean_square(body, dtype, shape):
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype, seed=1)
    found = layers.rms_norm.implementation(body)(x, weight, EPS)
    assert found.dtype == dtype
    assert agrees(found, normed(x.double(), weight))
    assert not agrees(found, normed(x.double(), weight, power=1))


@DTYPES
def test_a_norm_of_some_columns_reads_them_where_they_lie(dtype):
    x, weight = noise(5, 60, dtype=dtype)[:, 13:46], noise(33, dtype=dtype, seed=1)
    assert layers.rms_norm.body_of(x, weight, EPS).name == "numba"
    found = layers.rms_norm(x, weight, EPS)
    assert found.is_contiguous() and agrees(found, normed(x.double(), weight))


@BODIES
@DTYPES
@SHAPES
def test_the_residual_is_added_before_the_norm_and_handed_on(body, dtype, shape):
    x, residual = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    weight = noise(shape[-1], dtype=dtype, seed=2)
    found, total = layers.add_rms_norm.implementation(body)(x, residual, weight, EPS)
    exact = x.double() + residual.double()
    assert agrees(found, normed(exact, weight))
    assert_close(total, exact.to(dtype), rtol=0, atol=0)
    assert not agrees(found, normed(x.double(), weight))


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Columns i and i + rotary_dim/2 are the parts of a complex number, turned by its angle."""
    half = angles.shape[-1]
    points = torch.complex(x[..., :half], x[..., half : 2 * half])
    points = points * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([points.real, points.imag, x[..., 2 * half :]], dim=-1)


@BODIES
@DTYPES
@pytest.mark.parametrize("rotary_dim", [8, 4], ids=["whole", "part"])
def test_queries_and_keys_turn_to_their_positions(body, dtype, rotary_dim):
    # As SGLang hands them over: two views of one projection.
    query, key, _ = noise(5, 6 * 8, dtype=dtype).split([24, 16, 8], dim=-1)
    query, key = query.view(5, 3, 8), key.view(5, 2, 8)
    positions = torch.tensor([9, 0, 3, 3, 1])
    # Quarter turns: their cosines are stored without error in any dtype.
    angles = torch.arange(10)[:, None] * torch.tensor([1, 2, 3, 0][: rotary_dim // 2])
    angles = angles.double() * torch.pi / 2
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).round().to(dtype)
    found = layers.rotate_neox.implementation(body)(query, key, positions, cos_sin)
    for x, y in zip((query, key), found, strict=True):
        assert y.dtype == dtype and y.is_contiguous()
        assert agrees(y, turned(x.double(), angles[positions]))
        assert not agrees(y, turned(x.double(), -angles[positions]))
        assert not agrees(y, turned(x.double(), angles[positions.flip(0)]))


@BODIES
@DTYPES
def test_a_rotation_by_any_angle_keeps_float32s_precision(body, dtype):
    query = noise(4, 3, 64, dtype=dtype)
    angles = 100 * torch.rand(8, 32, generator=torch.Generator().manual_seed(1)).double()
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    positions = torch.tensor([7, 0, 2, 5])
    cos, sin = cos_sin.double()[positions][:, None].chunk(2, dim=-1)
    first, second = query.double().chunk(2, dim=-1)
    exact = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    found, _ = layers.rotate_neox.implementation(body)(query, query, positions, cos_sin)
    assert agrees(found, exact)


@BODIES
@DTYPES
@pytest.mark.parametrize("rotary_dim", [8, 4], ids=["whole", "part"])
@pytest.mark.parametrize("of_angles", [torch.float32, None], ids=["fp32 cosines", "its own"])
def test_neighbouring_columns_turn_as_one_number(body, dtype, rotary_dim, of_angles):
    # As DeepSeek hands them over: columns of each head, and the last columns of a row.
    query, key = noise(5, 3, 12, dtype=dtype)[..., 4:], noise(5, 20, dtype=dtype)[:, None, 12:]
    positions, half = torch.tensor([9, 0, 3, 3, 1]), rotary_dim // 2
    angles = torch.rand(10, half, generator=torch.Generator().manual_seed(1)).double()
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(of_angles or dtype)
    found = layers.rotate_interleaved.implementation(body)(query, key, positions, cos_sin)
    cos, sin = cos_sin.double().chunk(2, dim=-1)

    def exact(x, positions):
        pairs = torch.view_as_complex(
            x[..., :rotary_dim].double().unflatten(-1, (half, 2)).contiguous()
        )
        pairs = pairs * torch.complex(cos, sin)[positions][:, None]
        return torch.cat([torch.view_as_real(pairs).flatten(-2), x[..., rotary_dim:]], dim=-1)

    for x, y in zip((query, key), found, strict=True):
        assert y.dtype == dtype and y.is_contiguous()
        assert agrees(y, exact(x, positions))
        assert not agrees(y, exact(x, positions.flip(0)))


@BODIES
@DTYPES
@SHAPES
def test_swiglu_gates_the_second_half_by_the_first(body, dtype, shape):
    gate, up = 20 * noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    found = layers.swiglu.implementation(body)(torch.cat([gate, up], dim=-1))
    assert agrees(found, gate.double() * torch.sigmoid(gate.double()) * up.double())
    assert not agrees(found, up.double() * torch.sigmoid(up.double()) * gate.double())


@numba.njit
def exponentials(x, y):
    for i in range(len(x)):
        y[i] = numba_floats.exp(x[i])


def test_exp_is_exact_to_two_units_in_the_last_place():
    x = np.linspace(-87, 88, 1_000_001, dtype=np.float32)
    found = np.empty_like(x)
    exponentials(x, found)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(found - exact) <= 2.0**-22 * exact).all()
    assert not (np.abs(found - exact) <= 2.0**-25 * exact).all()


def test_exp_keeps_nan_and_does_not_leave_the_numbers():
    x = np.array([np.nan, -np.inf, np.inf, -1e30, 0.0], np.float32)
    found = np.empty_like(x)
    exponentials(x, found)
    assert np.isnan(found[0]) and found[4] == 1
    assert 0 <= found[1] == found[3] < 1.3e-38 and 2e38 < found[2] < np.inf


@numba.njit
def narrowed(x, y):
    for i in range(len(x)):
        y[i] = numba_floats.narrow(x[i], y[i])


@numba.njit
def widened(x, y):
    for i in range(len(x)):
        y[i] = numba_floats.widen(x[i])


def test_bfloat16_is_rounded_as_ieee_says():
    """PyTorch's conversion is the oracle: every bfloat16, and float32s around and between them."""
    upper = torch.arange(2**16)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper + lower).flatten()
    x = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    found = np.empty(len(x), np.uint16)
    narrowed(x.numpy(), found)
    expected = x.bfloat16()
    assert_close(
        torch.from_numpy(found).view(torch.bfloat16), expected, rtol=0, atol=0, equal_nan=True
    )
    wide = np.empty(len(x), np.float32)
    widened(found, wide)
    assert_close(torch.from_numpy(wide), expected.float(), rtol=0, atol=0, equal_nan=True)
