"""The prolog of latent attention is the paper's formulas, and with the absorbed attention behind it
DeepSeek-V3's own layer.

The oracles are float64 loops over single numbers, and transformers' DeepseekV3Attention; a control
with one mistake in a step does not pass.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from sglang_ascend.ops import attention, kv_cache, mla, norm, rotary
from sglang_ascend.ops.mla import fused

ROWS, HIDDEN, RANK, HEADS, NOPE, LATENT, ROPE, PAGE = 5, 24, 12, 3, 6, 10, 8, 4
EPS = 0.25  # large, so that a norm without it is another
SLOTS = [6, 0, 11, 3, 7]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_projections() -> mla.Projections:
    return mla.Projections(
        w_dq=noise(HIDDEN, RANK, seed=1),
        q_norm=noise(RANK, seed=2),
        w_uq_qr=noise(RANK, HEADS * (NOPE + ROPE), seed=3),
        w_uk=noise(HEADS, NOPE, LATENT, seed=4),
        w_dkv_kr=noise(HIDDEN, LATENT + ROPE, seed=5),
        kv_norm=noise(LATENT, seed=6),
    )


def times(row: list[float], matrix: list[list[float]]) -> list[float]:
    """row [in] times matrix [in, out]"""
    columns = zip(*matrix, strict=True)
    return [sum(x * w for x, w in zip(row, column, strict=True)) for column in columns]


def normed(row: list[float], weight: list[float]) -> list[float]:
    rms = math.sqrt(sum(x * x for x in row) / len(row) + EPS)
    return [x / rms * w for x, w in zip(row, weight, strict=True)]


def turned(row: list[float], angles: list[float]) -> list[float]:
    """Neighbours turned as points of a plane: their abscissas, then their ordinates."""
    points = [
        complex(row[2 * i], row[2 * i + 1]) * complex(math.cos(angle), math.sin(angle))
        for i, angle in enumerate(angles)
    ]
    return [point.real for point in points] + [point.imag for point in points]


def by_loops(x, projections, angles) -> list[torch.Tensor]:
    """query, query_rope and both caches, zero where nothing is written."""
    w = mla.Projections(*(tensor.double().tolist() for tensor in projections))
    query, query_rope = torch.zeros(ROWS, HEADS, LATENT), torch.zeros(ROWS, HEADS, ROPE)
    latents, ropes = torch.zeros(3 * PAGE, LATENT), torch.zeros(3 * PAGE, ROPE)
    for i, (row, of_row) in enumerate(zip(x.tolist(), angles.tolist(), strict=True)):
        heads = times(normed(times(row, w.w_dq), w.q_norm), w.w_uq_qr)
        for head in range(HEADS):
            columns = heads[head * (NOPE + ROPE) : (head + 1) * (NOPE + ROPE)]
            query[i, head] = torch.tensor(times(columns[:NOPE], w.w_uk[head]))
            query_rope[i, head] = torch.tensor(turned(columns[NOPE:], of_row))
        kv = times(row, w.w_dkv_kr)
        latents[SLOTS[i]] = torch.tensor(normed(kv[:LATENT], w.kv_norm))
        ropes[SLOTS[i]] = torch.tensor(turned(kv[LATENT:], of_row))
    return [query, query_rope, latents, ropes]


def check_prolog() -> None:
    x, angles, projections = (
        noise(ROWS, HIDDEN),
        noise(ROWS, ROPE // 2, seed=7),
        random_projections(),
    )
    both = torch.cat([angles, angles], dim=-1)
    caches = torch.zeros(3, PAGE, 1, LATENT), torch.zeros(3, PAGE, 1, ROPE)
    slots = torch.tensor(SLOTS)
    found = mla.prolog(x, mla.packed(projections), both.cos(), both.sin(), slots, *caches, eps=EPS)
    flat = [cache.flatten(0, 2) for cache in caches]
    for result, expected in zip([*found, *flat], by_loops(x, projections, angles), strict=True):
        assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_queries_and_cached_keys_are_what_the_formulas_say():
    check_prolog()


def turns_the_other_way(monkeypatch):
    right = rotary.rotate_pairs
    monkeypatch.setattr(rotary, "rotate_pairs", lambda x, cos, sin: right(x, cos, -sin))


def turns_halves(monkeypatch):
    monkeypatch.setattr(rotary, "rotate_pairs", rotary.rotate_halves)


def leaves_out_the_norm(monkeypatch):
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps: x)


def writes_one_slot_further(monkeypatch):
    right = kv_cache.write_latent

    def write_latent(kv, weight, cos, sin, slots, *rest):
        right(kv, weight, cos, sin, (slots + 1) % (3 * PAGE), *rest)

    monkeypatch.setattr(kv_cache, "write_latent", write_latent)


@pytest.mark.parametrize(
    "mistake", [turns_the_other_way, turns_halves, leaves_out_the_norm, writes_one_slot_further]
)
def test_a_mistake_in_a_step_is_seen(monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check_prolog()


@pytest.fixture(scope="module")
def layer() -> DeepseekV3Attention:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=RANK,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=5,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = DeepseekV3Attention(config, layer_idx=0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@torch.no_grad()
def by_transformers(layer: DeepseekV3Attention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The layer's output [rows, hidden], and the cosines and sines [rows, rope_dim] it used."""
    angles = DeepseekV3RotaryEmbedding(layer.config)(x[None], torch.arange(len(x))[None])
    mask = torch.full((len(x), len(x)), -math.inf).triu(1)[None, None]
    output, *_ = layer(x[None], position_embeddings=angles, attention_mask=mask)
    return output[0], angles[0][0], angles[1][0]


@torch.no_grad()
def by_operators(
    layer: DeepseekV3Attention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The same by the prolog, the paged absorbed attention, and what follows it."""
    w_uk, w_uv = layer.kv_b_proj.weight.view(HEADS, NOPE + 5, LATENT).split([NOPE, 5], dim=1)
    projections = mla.Projections(
        w_dq=layer.q_a_proj.weight.T,
        q_norm=layer.q_a_layernorm.weight,
        w_uq_qr=layer.q_b_proj.weight.T,
        w_uk=w_uk,
        w_dkv_kr=layer.kv_a_proj_with_mqa.weight.T,
        kv_norm=layer.kv_a_layernorm.weight,
    )
    slots = torch.arange(PAGE, PAGE + ROWS)  # pages 1 and 2
    caches = torch.zeros(3, PAGE, 1, LATENT), torch.zeros(3, PAGE, 1, ROPE)
    eps = layer.q_a_layernorm.variance_epsilon
    queries = mla.prolog(x, mla.packed(projections), cos, sin, slots, *caches, eps=eps)
    attended = attention.paged_mla(
        torch.cat(queries, dim=-1),
        torch.cat(caches, dim=-1).flatten(0, 1),
        torch.tensor([[1, 2]]),
        torch.tensor([ROWS]),
        query_len=ROWS,
        page_size=PAGE,
        scale=(NOPE + ROPE) ** -0.5,
        kv_lora_rank=LATENT,
    )
    values = torch.einsum("rhl,hvl->rhv", attended, w_uv)
    return layer.o_proj(values.flatten(1))


def test_with_absorbed_attention_it_is_the_layer_of_transformers(layer):
    x = noise(ROWS, HIDDEN)
    expected, cos, sin = by_transformers(layer, x)
    assert_close(by_operators(layer, x, cos, sin), expected, rtol=1e-4, atol=1e-4)
    control = by_operators(layer, x, cos, -sin)
    assert not torch.allclose(control, expected, rtol=1e-2, atol=1e-2)


def documented_call(**changes) -> tuple:
    """Shapes that torch_npu's operator takes, but for ``changes``."""
    sizes = {"hidden": 7168, "rank": 1536, "heads": 16, "nope": 128, "latent": 512, "rope": 64}
    sizes |= {"page": 128} | changes
    hidden, rank, heads, nope, latent, rope, page = sizes.values()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    projections = mla.Projections(
        empty(hidden, rank),
        empty(rank),
        empty(rank, heads * (nope + rope)),
        empty(heads, nope, latent),
        empty(hidden, latent + rope),
        empty(latent),
    )
    slots = torch.empty(4, dtype=torch.int64, device="meta")
    caches = empty(9, page, 1, latent), empty(9, page, 1, rope)
    return empty(4, hidden), projections, empty(4, rope), empty(4, rope), slots, *caches


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 4096},
        {"rank": 768},
        {"heads": 12},
        {"nope": 64},
        {"latent": 256},
        {"rope": 32},
        {"page": 64},
    ],
    ids=str,
)
def test_the_fused_body_takes_the_documented_sizes_alone(changes):
    assert fused.accepts(*documented_call(), eps=EPS)
    assert not fused.accepts(*documented_call(**changes), eps=EPS)


def test_the_fused_body_takes_bfloat16_and_int64_slots_alone():
    x, projections, cos, sin, slots, *caches = documented_call()
    assert not fused.accepts(x.float(), projections, cos, sin, slots, *caches, eps=EPS)
    assert not fused.accepts(x, projections, cos.float(), sin, slots, *caches, eps=EPS)
    assert not fused.accepts(x, projections, cos, sin, slots.int(), *caches, eps=EPS)
