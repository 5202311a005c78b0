"""Norms, rotations and cache writes on the emulated NPU are what loops over elements say.

Called through the real torch_npu, whose result shapes they must have; a mistake in each is caught.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu

from npu_emulation.goldens import kvcache, norms, rotary

LATENT, ROPE = 512, 64  # the sizes that the fused operator is made for


def rms_row(row: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> list[float]:
    scale = 1 / math.sqrt(sum(float(x) ** 2 for x in row) / len(row) + epsilon)
    return [float(x) * scale * float(g) for x, g in zip(row, gamma, strict=True)]


def turned_pairs(row: torch.Tensor, angles: list[float], pairs: str) -> list[tuple[float, float]]:
    """Pair i of the row as a complex number, times e^(i angle)."""
    half = len(row) // 2
    result = []
    for i, angle in enumerate(angles):
        places = (i, i + half) if pairs == "half" else (2 * i, 2 * i + 1)
        z = complex(row[places[0]], row[places[1]])
        z *= complex(math.cos(angle), math.sin(angle))
        result.append((z.real, z.imag))
    return result


def cos_sin(angles: torch.Tensor, pairs: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D/2] angles to cos and sin [..., D] as the operators take them."""
    full = torch.cat((angles, angles), -1) if pairs == "half" else angles.repeat_interleave(2, -1)
    return full.cos(), full.sin()


def close(result: torch.Tensor, wanted: list) -> None:
    torch.testing.assert_close(result.cpu(), torch.tensor(wanted).view(result.shape))


def check_norm() -> None:
    x, gamma = torch.randn(3, 16), torch.randn(16)
    y, rstd = torch_npu.npu_rms_norm(x.to("npu"), gamma.to("npu"), 1e-2)
    torch.testing.assert_close(y.cpu(), torch.tensor([rms_row(row, gamma, 1e-2) for row in x]))
    wanted = (x.double().square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    torch.testing.assert_close(rstd.cpu(), wanted.float())


def test_rms_norm_divides_by_the_root_of_the_mean_square(numerics):
    check_norm()


def test_a_norm_without_its_epsilon_is_caught(numerics, monkeypatch):
    right = norms.normalized
    monkeypatch.setattr(norms, "normalized", lambda x, gamma, epsilon: right(x, gamma, 0.0))
    with pytest.raises(AssertionError):
        check_norm()


def check_rotation(pairs: str) -> None:
    x, angles = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 1, 4)
    cos, sin = cos_sin(angles, pairs)
    result = torch_npu.npu_rotary_mul(x.to("npu"), cos.to("npu"), sin.to("npu"), pairs).cpu()
    for request in range(2):
        for head in range(3):
            turned = turned_pairs(x[request, 0, head], angles[request, 0, 0].tolist(), pairs)
            row = torch.empty(8)
            for i, (first, second) in enumerate(turned):
                places = (i, i + 4) if pairs == "half" else (2 * i, 2 * i + 1)
                row[places[0]], row[places[1]] = first, second
            torch.testing.assert_close(result[request, 0, head], row)


@pytest.mark.parametrize("pairs", ["half", "interleave"])
def test_rotation_turns_each_pair_by_its_angle(numerics, pairs):
    check_rotation(pairs)


def test_a_rotation_the_other_way_is_caught(numerics, monkeypatch):
    right = rotary.rotated
    monkeypatch.setattr(rotary, "rotated", lambda x, cos, sin, pairs: right(x, cos, -sin, pairs))
    with pytest.raises(AssertionError):
        check_rotation("half")


@pytest.mark.parametrize("pairs", ["half", "interleave"])
def test_rotation_by_positions_turns_the_first_elements_of_each_head(numerics, pairs):
    positions, angles = torch.tensor([3, 0]), torch.randn(5, 4)
    query, key = torch.randn(2, 3 * 16), torch.randn(2, 16)
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    results = torch_npu.npu_mrope(
        positions.to("npu"),
        query.to("npu"),
        key.to("npu"),
        cache.to("npu"),
        16,
        mrope_section=[0, 0, 0],
        rotary_mode=pairs,
    )
    for x, result in zip((query, key), results, strict=True):
        wanted = x.clone().view(2, -1, 16)
        for token, position in enumerate(positions.tolist()):
            for head in range(wanted.shape[1]):
                row = wanted[token, head]
                turned = turned_pairs(row[:8].clone(), angles[position].tolist(), pairs)
                for i, (first, second) in enumerate(turned):
                    places = (i, i + 4) if pairs == "half" else (2 * i, 2 * i + 1)
                    row[places[0]], row[places[1]] = first, second
        torch.testing.assert_close(result.cpu(), wanted.view(x.shape))


def interleaved_row(row: torch.Tensor, angles: list[float]) -> list[float]:
    """Pairs (2i, 2i + 1) turned: first of all pairs, then second."""
    turned = turned_pairs(row, angles, "interleave")
    return [first for first, _ in turned] + [second for _, second in turned]


def test_interleaved_rotation_gives_the_first_of_all_pairs_then_the_second(numerics):
    x, angles = torch.randn(2, 3, 1, ROPE), torch.randn(2, 1, 1, ROPE // 2)
    cos, sin = cos_sin(angles, "half")
    result = torch_npu.npu_interleave_rope(x.to("npu"), cos.to("npu"), sin.to("npu"))
    wanted = [
        interleaved_row(x[request, head, 0], angles[request, 0, 0].tolist())
        for request in range(2)
        for head in range(3)
    ]
    close(result, wanted)


def check_fused_write() -> None:
    slots = torch.tensor([130, -1, 5])
    kv, gamma = torch.randn(3, 1, 1, LATENT + ROPE), torch.randn(LATENT)
    angles = torch.randn(3, 1, 1, ROPE // 2)
    cos, sin = cos_sin(angles, "half")
    caches = {ROPE: torch.zeros(2, 128, 1, ROPE), LATENT: torch.zeros(2, 128, 1, LATENT)}
    on_device = {width: cache.to("npu") for width, cache in caches.items()}
    _, _, rope, latent = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.to("npu"),
        gamma.to("npu"),
        cos.to("npu"),
        sin.to("npu"),
        slots.to("npu"),
        on_device[ROPE],
        on_device[LATENT],
        epsilon=1e-6,
        cache_mode="PA_BNSD",
        is_output_kv=True,
    )
    for token, slot in enumerate(slots.tolist()):
        row = kv[token, 0, 0]
        normed = torch.tensor(rms_row(row[:LATENT], gamma, 1e-6))
        turned = torch.tensor(interleaved_row(row[LATENT:], angles[token, 0, 0].tolist()))
        torch.testing.assert_close(latent[token, 0, 0].cpu(), normed)
        torch.testing.assert_close(rope[token, 0, 0].cpu(), turned)
        if slot >= 0:
            caches[LATENT].view(-1, LATENT)[slot] = normed
            caches[ROPE].view(-1, ROPE)[slot] = turned
    for width, cache in caches.items():
        torch.testing.assert_close(on_device[width].cpu(), cache)


def test_the_fused_write_puts_normed_latents_and_turned_keys_into_their_slots(numerics):
    check_fused_write()


def test_a_fused_write_that_does_not_de_interleave_is_caught(numerics, monkeypatch):
    monkeypatch.setattr(rotary, "de_interleaved", lambda x: x)
    with pytest.raises(AssertionError):
        check_fused_write()


def write_nd(keys, values, caches, slots):
    for cache, rows in zip(caches, (keys, values), strict=True):
        flat = cache.view(-1, *cache.shape[2:])
        torch_npu.npu_scatter_nd_update_(flat, slots.view(-1, 1), rows)


def write_pages(keys, values, caches, slots):
    torch_npu.npu_scatter_pa_kv_cache(keys, values, *caches, slots, cache_mode="Norm")


def write_atb(keys, values, caches, slots):
    torch_npu._npu_reshape_and_cache(keys, values, *caches, slots)


def check_writes(write) -> None:
    slots = [3, 200, 7]
    keys, values = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    wanted = [torch.ones(2, 128, 2, 16) for _ in range(2)]
    caches = [cache.to("npu") for cache in wanted]
    index = torch.tensor(slots, dtype=torch.int32).to("npu")
    write(keys.to("npu"), values.to("npu"), caches, index)
    for cache, rows in zip(wanted, (keys, values), strict=True):
        for slot, row in zip(slots, rows, strict=True):
            cache[slot // 128, slot % 128] = row
    for result, cache in zip(caches, wanted, strict=True):
        torch.testing.assert_close(result.cpu(), cache)


@pytest.mark.parametrize("write", [write_nd, write_pages, write_atb])
def test_rows_go_to_their_slots_and_nowhere_else(numerics, write):
    check_writes(write)


def test_rows_one_slot_further_are_caught(numerics, monkeypatch):
    right = kvcache.write_slots
    monkeypatch.setattr(
        kvcache, "write_slots", lambda cache, rows, slots: right(cache, rows, slots + 1)
    )
    with pytest.raises(AssertionError):
        check_writes(write_pages)
