"""DeepSeek-V3's MTP layer is what its formulas say, in every body that serves on a CPU.

The oracle is written from the paper, in float64, row by row and head by head, with keys and values
brought back from the latent space as training has them; a control with one mistake does not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from sglang_ascend.ops import drafts, linear
from sglang_ascend.ops.dispatch import REFERENCE
from sglang_ascend.ops.drafts.reference import LatentLayer
from sglang_ascend.ops.linear.reference import PreparedWeight

BODIES = pytest.mark.parametrize("body", [REFERENCE, "numba"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Of the largest value: float32 roundings of some twenty operators; bfloat16 rounds between them.
TOLERANCES = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-6}
HIDDEN, VOCABULARY, QUERY_RANK, RANK, NOPE, ROPE, VALUE, HEADS = 64, 50, 32, 24, 12, 8, 20, 3
EXPERTS, EXPERT_SIZE, SHARED_SIZE, PER_TOKEN = 8, 32, 48, 2
NUM_SLOTS, PAGE = 64, 2


def made(dtype: torch.dtype) -> LatentLayer:
    draw = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) / shape[-1] ** 0.5).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return (1 + torch.randn(width, generator=draw) / 8).to(dtype)

    def weight(out: int, width: int) -> PreparedWeight:
        return linear.prepare(noise(out, width))

    angles = torch.arange(99.0)[:, None] * 0.3 ** torch.arange(ROPE // 2)
    return LatentLayer(
        embedding=noise(VOCABULARY, HIDDEN),
        token_norm=norm(HIDDEN),
        state_norm=norm(HIDDEN),
        join=weight(HIDDEN, 2 * HIDDEN),
        input_norm=norm(HIDDEN),
        down=weight(QUERY_RANK + RANK + ROPE, HIDDEN),
        query_norm=norm(QUERY_RANK),
        query_up=weight(HEADS * (NOPE + ROPE), QUERY_RANK),
        key_norm=norm(RANK),
        to_latent=noise(HEADS, NOPE, RANK),
        from_latent=noise(HEADS, RANK, VALUE),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1),
        attention_out=weight(HIDDEN, HEADS * VALUE),
        experts_norm=norm(HIDDEN),
        router=weight(EXPERTS, HIDDEN),
        router_bias=torch.randn(EXPERTS, generator=draw) / 8,
        experts_gate_up=noise(EXPERTS, 2 * EXPERT_SIZE, HIDDEN),
        experts_down=noise(EXPERTS, HIDDEN, EXPERT_SIZE),
        shared_gate_up=weight(2 * SHARED_SIZE, HIDDEN),
        shared_down=weight(HIDDEN, SHARED_SIZE),
        output_norm=norm(HIDDEN),
        eps=1e-3,
        latent_eps=1e-2,
        num_experts_per_token=PER_TOKEN,
        num_groups=4,
        num_kept_groups=2,
        routed_scale=1.5,
        attention_scale=0.2,
    )


def rows_of(dtype: torch.dtype, lens: list[int], query_len: int) -> dict[str, Any]:
    """The last rows of requests of these lengths, their pages in any order; arguments by name."""
    draw = torch.Generator().manual_seed(1)
    pages = torch.randperm(NUM_SLOTS // PAGE, generator=draw).view(len(lens), -1)
    places = [range(length - query_len, length) for length in lens]
    positions = torch.tensor([place for of_request in places for place in of_request])
    of_row = pages.repeat_interleave(query_len, 0)
    page = of_row.gather(1, positions[:, None] // PAGE)[:, 0]
    states = torch.randn(len(positions), HIDDEN, generator=draw)
    cache = torch.randn(NUM_SLOTS, 1, RANK + ROPE, generator=draw)
    return {
        "tokens": torch.randint(VOCABULARY, (len(positions),), generator=draw),
        "states": states.to(dtype),
        "positions": positions,
        "latent_cache": cache.to(dtype),
        "slots": page * PAGE + positions % PAGE,
        "block_table": pages,
        "kv_lens": torch.tensor(lens),
        "query_len": query_len,
        "page_size": PAGE,
    }


def wide(layer: LatentLayer) -> Any:
    """In float64; of a prepared weight the matrix."""
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    matrices = {n: x.dense if isinstance(x, PreparedWeight) else x for n, x in values.items()}
    tensors = {n: x.double() for n, x in matrices.items() if isinstance(x, torch.Tensor)}
    return type("Wide", (), values | tensors)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def turned(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring columns as complex numbers."""
    cos, sin = cos_sin.chunk(2)
    pairs = torch.view_as_complex(x.view(-1, 2).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(pairs).flatten()


def gated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (torch.nn.functional.silu(gate) * up)


def mixture(layer: Any, x: torch.Tensor) -> torch.Tensor:
    affinity = (layer.router @ x).sigmoid()
    choice = (affinity + layer.router_bias).tolist()
    size = EXPERTS // layer.num_groups
    of_group = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(4)]
    groups = sorted(range(4), key=lambda g: -of_group[g])[: layer.num_kept_groups]
    allowed = [e for e in range(EXPERTS) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:PER_TOKEN]
    parts = [
        affinity[e] * gated(x, layer.experts_gate_up[e], layer.experts_down[e]) for e in chosen
    ]
    routed = sum(parts) / affinity[chosen].sum() * layer.routed_scale
    return routed + gated(x, layer.shared_gate_up, layer.shared_down)


def exact(layer: Any, rows: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the cache, in float64."""
    cache, outputs, joined = rows["latent_cache"].double()[:, 0], [], []
    queries: list[torch.Tensor] = []
    for token, state, position, slot in zip(
        rows["tokens"], rows["states"].double(), rows["positions"], rows["slots"], strict=True
    ):
        halves = (
            normed(layer.embedding[token], layer.token_norm, layer.eps),
            normed(state, layer.state_norm, layer.eps),
        )
        joined.append(layer.join @ torch.cat(halves))
        down = layer.down @ normed(joined[-1], layer.input_norm, layer.eps)
        query, latent, key_rope = down.split((QUERY_RANK, RANK, ROPE))
        query = layer.query_up @ normed(query, layer.query_norm, layer.latent_eps)
        queries.append(query.view(HEADS, -1))
        key = normed(latent, layer.key_norm, layer.latent_eps)
        cache[slot] = torch.cat((key, turned(key_rope, layer.cos_sin[position])))
    for i, position in enumerate(rows["positions"].tolist()):
        pages = rows["block_table"][i // rows["query_len"]]
        seen = [int(pages[j // PAGE]) * PAGE + j % PAGE for j in range(position + 1)]
        latents, ropes = cache[seen].split((RANK, ROPE), dim=1)
        values = []
        for head in range(HEADS):
            nope, rope = queries[i][head].split((NOPE, ROPE))
            keys = latents @ layer.to_latent[head].T
            rope = turned(rope, layer.cos_sin[position])
            scores = (keys @ nope + ropes @ rope) * layer.attention_scale
            values.append(scores.softmax(0) @ (latents @ layer.from_latent[head]))
        residual = joined[i] + layer.attention_out @ torch.cat(values)
        mixed = mixture(layer, normed(residual, layer.experts_norm, layer.eps))
        outputs.append(normed(residual + mixed, layer.output_norm, layer.eps))
    return torch.stack(outputs), cache[:, None]


def run(body: str, layer: LatentLayer, rows: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    given = rows | {"latent_cache": rows["latent_cache"].clone()}
    function: Callable[..., Any] = drafts.latent_layer.implementation(body)
    return function(layer, **given), given["latent_cache"]


def agrees(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    limits = [TOLERANCES[x.dtype] * y.abs().max() for x, y in zip(found, expected, strict=True)]
    apart = [(x.double() - y).abs().max() for x, y in zip(found, expected, strict=True)]
    print([f"{float(a):.2e} of {float(limit):.2e}" for a, limit in zip(apart, limits, strict=True)])
    return all(a <= limit for a, limit in zip(apart, limits, strict=True))


LENGTHS = pytest.mark.parametrize(
    ("lens", "query_len"), [([5], 1), ([9], 4), ([17, 4], 2), ([30, 7], 3)], ids=str
)


@BODIES
@DTYPES
@LENGTHS
def test_a_layer_of_a_few_rows_is_what_its_formulas_say(body, dtype, lens, query_len):
    layer, rows = drafts.prepare_latent(made(dtype)), rows_of(dtype, lens, query_len)
    assert drafts.latent_layer.body_of(layer, **rows).name == "numba"
    found = run(body, layer, rows)
    assert agrees(found, exact(wide(layer), rows))
    mistaken = rows | {"positions": rows["positions"] + 1}
    assert not agrees(run(body, layer, mistaken), exact(wide(layer), rows))


@pytest.mark.parametrize(
    "mistake",
    [
        {"routed_scale": 1.0},
        {"eps": 1e-6},
        {"latent_eps": 1e-6},
        {"attention_scale": 0.3},
        {"num_kept_groups": 1},
        {"router_bias": torch.zeros(EXPERTS)},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_what_is_said_of_a_layer_counts(mistake):
    layer, rows = made(torch.float32), rows_of(torch.float32, [30, 7], 3)
    other = drafts.prepare_latent(replace(layer, **mistake))
    assert not agrees(run("numba", other, rows), exact(wide(layer), rows))


def test_one_thread_gives_the_same_bits():
    layer, rows = drafts.prepare_latent(made(torch.float32)), rows_of(torch.float32, [9], 4)
    several = run("numba", layer, rows)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run("numba", layer, rows)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, several, alone))


def test_what_the_compiled_layer_leaves_to_the_reference():
    layer = drafts.prepare_latent(made(torch.float32))
    of_body = drafts.latent_layer.body_of
    few, many = rows_of(torch.float32, [9], 4), rows_of(torch.float32, [30, 30], 17)
    assert of_body(layer, **few).name == "numba"
    assert of_body(layer, **many).name == REFERENCE
    half = rows_of(torch.bfloat16, [9], 4)
    assert of_body(layer, **half).name == REFERENCE
    assert of_body(made(torch.float32), **few).name == REFERENCE  # not prepared
    turned_round = replace(layer, experts_down=layer.experts_down.mT.contiguous().mT)
    assert drafts.prepare_latent.body_of(turned_round).name == REFERENCE


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [("tokens", VOCABULARY, "not of the vocabulary"), ("slots", NUM_SLOTS, "the cache has not")],
)
def test_a_row_that_lies_nowhere_is_refused(name, number, message):
    layer, rows = drafts.prepare_latent(made(torch.float32)), rows_of(torch.float32, [9], 4)
    for astray in (number, -1):
        rows[name] = rows[name].clone()
        rows[name][2] = astray
        with pytest.raises(IndexError, match=message):
            run("numba", layer, rows)
