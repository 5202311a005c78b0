"""A server is lossy only when told so, says it at start, and then accepts more than it may."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launched_server import greedy
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import conversation

VARIABLE = "SGLANG_ASCEND_LOSSY_ACCEPTANCE"
# The end of a user's turn opens the section and nothing closes it: all of a reply is inside.
POLICY = "relaxed:5,1.0,{start},{end}"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


@pytest.mark.parametrize("variant", ["lossy"])
def test_relaxed_acceptance_inside_a_section(
    servers: ServerPool, model_folder: Path, tokenizer, held_out_prompts, variant: str
) -> None:
    prompts = [conversation(tokenizer, text) for text in held_out_prompts["maths"][:24]]
    (start,) = {tokenizer.convert_ids_to_tokens(prompt[-1]) for prompt in prompts}
    mtp = plain_and_mtp(model_folder)[1]

    def ask(policy: str):
        (server,) = servers.get(replace(mtp, variables=((VARIABLE, policy),)))
        assert "replies are LOSSY" in server.log()
        return server.generate(prompts, greedy(32))

    never = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    inside = ask(POLICY.format(start=start, end=never))
    outside = ask(POLICY.format(start=never, end=start))
    assert all(len(tokenizer) - 1 not in reply.tokens for reply in inside + outside)
    assert tokens_per_step(inside) > tokens_per_step(outside) + 0.1
    changed = sum(a.tokens != b.tokens for a, b in zip(inside, outside, strict=True))
    assert changed > len(prompts) // 4
    (exact,) = servers.get(mtp)
    assert "LOSSY" not in exact.log()
    assert [reply.tokens for reply in exact.generate(prompts, greedy(32))] == [
        reply.tokens for reply in outside
    ]
