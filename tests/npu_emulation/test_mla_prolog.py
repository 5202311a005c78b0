"""`npu_mla_prolog_v3` on the emulated NPU is what loops over elements say.

The oracle is float64, from the formulas of the operator's documentation; a mistake in each step of
the definition is caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch_npu

from npu_emulation.goldens import kvcache, mla, norms, rotary
from sglang_ascend.ops.npu import CallRefused, CheckedCalls
from sglang_ascend.ops.npu.constraint import FRACTAL_NZ

ROWS, HIDDEN, RANK, HEADS, NOPE, LATENT, ROPE, PAGE = 3, 24, 12, 2, 6, 10, 8, 16
EPS_CQ, EPS_CKV = 0.25, 0.5
SLOTS = [17, 3, 30]
# The definition rounds once, at the end.
TOLERANCE = {"rtol": 2**-8, "atol": 2**-12}


def random_call() -> dict[str, torch.Tensor]:
    shapes = {
        "token_x": (ROWS, HIDDEN),
        "weight_dq": (HIDDEN, RANK),
        "weight_uq_qr": (RANK, HEADS * (NOPE + ROPE)),
        "weight_uk": (HEADS, NOPE, LATENT),
        "weight_dkv_kr": (HIDDEN, LATENT + ROPE),
        "rmsnorm_gamma_cq": (RANK,),
        "rmsnorm_gamma_ckv": (LATENT,),
    }
    call = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    angles = torch.randn(ROWS, ROPE // 2).repeat(1, 2)
    caches = {"kv_cache": LATENT, "kr_cache": ROPE}
    return (
        call
        | {"rope_sin": angles.sin().bfloat16(), "rope_cos": angles.cos().bfloat16()}
        | {name: torch.ones(2, PAGE, 1, width).bfloat16() for name, width in caches.items()}
        | {"cache_index": torch.tensor(SLOTS)}
    )


def times(row: list[float], matrix: list[list[float]]) -> list[float]:
    """row [in] times matrix [in, out]"""
    columns = zip(*matrix, strict=True)
    return [sum(x * w for x, w in zip(row, column, strict=True)) for column in columns]


def normed(row: list[float], gamma: list[float], epsilon: float) -> list[float]:
    scale = math.sqrt(sum(x * x for x in row) / len(row) + epsilon)
    return [x / scale * g for x, g in zip(row, gamma, strict=True)]


def turned(row: list[float], cos: list[float], sin: list[float]) -> list[float]:
    """Pair (2i, 2i + 1) times e^(i angle): the first of all pairs, then the second."""
    points = [
        complex(row[2 * i], row[2 * i + 1]) * complex(cos[i], sin[i]) for i in range(len(row) // 2)
    ]
    return [point.real for point in points] + [point.imag for point in points]


def oracle(call: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """query, query_rope, kv_cache and kr_cache in float64."""
    values = {name: tensor.double().tolist() for name, tensor in call.items()}
    query = torch.empty(ROWS, HEADS, LATENT, dtype=torch.float64)
    query_rope = torch.empty(ROWS, HEADS, ROPE, dtype=torch.float64)
    kv_cache, kr_cache = call["kv_cache"].double(), call["kr_cache"].double()
    for row, x in enumerate(values["token_x"]):
        angles = values["rope_cos"][row], values["rope_sin"][row]
        c_q = normed(times(x, values["weight_dq"]), values["rmsnorm_gamma_cq"], EPS_CQ)
        heads = times(c_q, values["weight_uq_qr"])
        for head in range(HEADS):
            start = head * (NOPE + ROPE)
            nope, rope = heads[start:][:NOPE], heads[start + NOPE :][:ROPE]
            query[row, head] = torch.tensor(times(nope, values["weight_uk"][head]))
            query_rope[row, head] = torch.tensor(turned(rope, *angles))
        kv = times(x, values["weight_dkv_kr"])
        place = SLOTS[row] // PAGE, SLOTS[row] % PAGE, 0
        c_kv = normed(kv[:LATENT], values["rmsnorm_gamma_ckv"], EPS_CKV)
        kv_cache[place] = torch.tensor(c_kv, dtype=torch.float64)
        kr_cache[place] = torch.tensor(turned(kv[LATENT:], *angles), dtype=torch.float64)
    return [query, query_rope, kv_cache, kr_cache]


def check_prolog() -> None:
    call = random_call()
    wanted = oracle(call)
    on_npu = {name: tensor.to("npu") for name, tensor in call.items()}
    query, query_rope, *_ = torch_npu.npu_mla_prolog_v3(
        **on_npu, rmsnorm_epsilon_cq=EPS_CQ, rmsnorm_epsilon_ckv=EPS_CKV
    )
    found = [query, query_rope, on_npu["kv_cache"], on_npu["kr_cache"]]
    for result, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(result.cpu().double(), expected, **TOLERANCE)


def test_queries_latents_and_rope_keys_are_what_the_formulas_say(numerics):
    check_prolog()


def turns_the_other_way(monkeypatch):
    right = rotary.rotated
    monkeypatch.setattr(rotary, "rotated", lambda x, cos, sin, pairs: right(x, cos, -sin, pairs))


def turns_halves(monkeypatch):
    monkeypatch.setattr(rotary, "de_interleaved", lambda x: x)


def writes_one_slot_further(monkeypatch):
    right = kvcache.write_slots
    monkeypatch.setattr(
        kvcache, "write_slots", lambda cache, rows, slots: right(cache, rows, slots + 1)
    )


def leaves_out_the_norms(monkeypatch):
    monkeypatch.setattr(norms, "normalized", lambda x, gamma, epsilon: (x, None))


def norms_with_one_epsilon(monkeypatch):
    right = norms.normalized
    monkeypatch.setattr(norms, "normalized", lambda x, gamma, epsilon: right(x, gamma, EPS_CQ))


def puts_rope_columns_first(monkeypatch):
    right = mla.projected

    def projected(rows, weight):
        product = right(rows, weight)
        if weight.shape[-1] != HEADS * (NOPE + ROPE):
            return product
        return product.unflatten(-1, (HEADS, -1)).roll(ROPE, -1).flatten(-2)

    monkeypatch.setattr(mla, "projected", projected)


@pytest.mark.parametrize(
    "mistake",
    [
        turns_the_other_way,
        turns_halves,
        writes_one_slot_further,
        leaves_out_the_norms,
        norms_with_one_epsilon,
        puts_rope_columns_first,
    ],
)
def test_a_mistake_in_the_definition_is_caught(numerics, monkeypatch, mistake):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check_prolog()


def documented_call(pack: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The smallest sizes of the documentation, of one head."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16, device="npu")

    return {
        "token_x": ones(2, 6144),
        "weight_dq": pack(ones(6144, 1536)),
        "weight_uq_qr": pack(ones(1536, 192)),
        "weight_uk": ones(1, 128, 512),
        "weight_dkv_kr": pack(ones(6144, 576)),
        "rmsnorm_gamma_cq": ones(1536),
        "rmsnorm_gamma_ckv": ones(512),
        "rope_sin": ones(2, 64),
        "rope_cos": ones(2, 64),
        "cache_index": torch.tensor([0, 1], device="npu"),
        "kv_cache": ones(1, 16, 1, 512),
        "kr_cache": ones(1, 16, 1, 64),
    }


def test_weights_that_were_not_packed_are_refused(numerics):
    packed = documented_call(lambda weight: torch_npu.npu_format_cast(weight, FRACTAL_NZ))
    plain = documented_call(lambda weight: weight)
    with CheckedCalls() as checked:
        torch.ops.npu.npu_mla_prolog_v3(**packed)
    assert not checked.unknown
    mixed = packed | {"weight_uq_qr": plain["weight_uq_qr"]}
    with CheckedCalls(), pytest.raises(CallRefused, match="weight_uq_qr is stored in the NZ"):
        torch.ops.npu.npu_mla_prolog_v3(**mixed)
