"""A chain of drafts by DeepSeek-V3's MTP layer is the layer's own output given back to it.

The oracle is the layer's of test_latent_layer.py, in float64: it is shown the drafts, and each must
be a likeliest token of it, up to roundings; what was written to the cache is the oracle's too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_latent_layer import (
    BODIES,
    DTYPES,
    HIDDEN,
    PAGE,
    TOLERANCES,
    VOCABULARY,
    agrees,
    exact,
    made,
    rows_of,
    wide,
)

from sglang_ascend.ops import drafts, linear
from sglang_ascend.ops.dispatch import REFERENCE

NUM_DRAFTS, PADDING = 3, 6
LENGTHS = pytest.mark.parametrize("lens", [[5], [17, 4], [9, 3, 6, 1]], ids=str)


def chain_of(dtype: torch.dtype, lens: list[int]) -> dict[str, Any]:
    """Arguments by name: of requests that have so many tokens before the chain's."""
    rows = rows_of(dtype, [length + 1 for length in lens], query_len=1)
    kv_lens = rows["kv_lens"] + torch.arange(NUM_DRAFTS)[:, None]
    positions = kv_lens - 1
    pages = rows["block_table"].T.gather(0, positions // PAGE)
    draw = torch.Generator().manual_seed(2)
    head = torch.randn(VOCABULARY + PADDING, HIDDEN, generator=draw) / 8
    head[VOCABULARY:] = 100.0  # columns of no token, and of a large logit, where the state's sum is
    del rows["query_len"]
    return rows | {
        "head": linear.prepare(head.to(dtype)),
        "positions": positions,
        "slots": pages * PAGE + positions % PAGE,
        "kv_lens": kv_lens,
        "vocab_size": VOCABULARY,
    }


def run(body: str, layer: Any, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    given = given | {"latent_cache": given["latent_cache"].clone()}
    function: Callable[..., Any] = drafts.latent_chain.implementation(body)
    return function(layer, **given), given["latent_cache"]


def behind_the_best(
    layer: Any, given: dict[str, Any], tokens: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """(By how much of the largest logit a draft lies below it, the cache), in float64."""
    rows, worst = {"query_len": 1, "page_size": PAGE, "block_table": given["block_table"]}, 0.0
    state, cache, before = given["states"].double(), given["latent_cache"].double(), given["tokens"]
    head = given["head"].dense.double()[:VOCABULARY]
    for j, drafted in enumerate(tokens):
        of_draft = {name: given[name][j] for name in ("positions", "slots", "kv_lens")}
        of_draft |= rows | {"states": state, "latent_cache": cache, "tokens": before}
        state, cache = exact(layer, of_draft)
        logits = state @ head.T
        behind = logits.amax(1) - logits.gather(1, drafted[:, None])[:, 0]
        worst, before = max(worst, float((behind / logits.abs().amax(1)).max())), drafted
    return worst, cache


@BODIES
@DTYPES
@LENGTHS
def test_each_draft_is_a_likeliest_token_of_the_layer_s_own_output(body, dtype, lens):
    layer, given = drafts.prepare_latent(made(dtype)), chain_of(dtype, lens)
    assert drafts.latent_chain.body_of(layer, **given).name == "numba"
    tokens, cache = run(body, layer, given)
    assert tokens.shape == (NUM_DRAFTS, len(lens))
    # A state goes through the layer as often as it is drafted from.
    limit = NUM_DRAFTS * TOLERANCES[dtype]
    behind, expected = behind_the_best(wide(layer), given, tokens)
    print(f"{behind:.2e} of {limit:.2e}")
    assert behind <= limit
    assert agrees((cache[given["slots"][0]],), (expected[given["slots"][0]],))
    # The controls: a row further on, and a chain that repeats its first draft.
    mistaken, _ = run(body, layer, given | {"positions": given["positions"] + 1})
    repeated = tokens[:1].expand_as(tokens)
    assert max(behind_the_best(wide(layer), given, one)[0] for one in (mistaken, repeated)) > limit


def test_the_first_of_equal_logits_is_drafted_and_padding_never():
    layer, given = drafts.prepare_latent(made(torch.float32)), chain_of(torch.float32, [5, 7])
    equal = torch.zeros(VOCABULARY + PADDING, HIDDEN)
    given["head"] = linear.prepare(equal)
    for body in (REFERENCE, "numba"):
        assert not run(body, layer, given)[0].any()


def test_what_the_compiled_chain_leaves_to_the_reference():
    layer, given = drafts.prepare_latent(made(torch.float32)), chain_of(torch.float32, [9])
    of_body = drafts.latent_chain.body_of
    assert of_body(layer, **given).name == "numba"
    assert of_body(made(torch.float32), **given).name == REFERENCE  # not prepared
    other = given | {"head": linear.prepare(given["head"].dense.bfloat16())}
    assert of_body(layer, **other).name == REFERENCE
    apart = given | {"slots": given["slots"].T.contiguous().T.repeat(1, 2)[:, ::2]}
    assert of_body(layer, **apart).name == REFERENCE
