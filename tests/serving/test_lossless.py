"""Greedy tokens with MTP are those without it, overlapped, 1 and 16 requests at once: 208 prompts
of nano-deepseek, 52 of smollm2-mtp.

In fp32 they are identical. In bf16 a token may differ only where bf16 does not tell the two apart
(greedy_oracle.py), and in no more than half of the replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from greedy_oracle import Oracle
from launched_server import LaunchedServer, Reply, greedy
from reference_model import ReferenceModel
from server_pairs import (
    MISTAKES,
    MODELS,
    TEST_TIMEOUT_S,
    ask_both,
    broken_verifiers,
    plain_and_mtp,
    tokens_per_step,
)
from server_pool import ServerPool
from serving_prompts import lossless_mix

NUM_PROMPTS = 208
# smollm2-mtp is served every fourth of them: a processor with AVX2 alone takes a second a prompt.
GREEDY_STRIDE = {"nano-deepseek": 1, "smollm2-mtp": 4}
NEW_TOKENS = {"nano-deepseek": 24, "smollm2-mtp": 16}
# One request at a time costs a forward a step; these still span more than one.
NEW_TOKENS_ALONE = {"nano-deepseek": 8, "smollm2-mtp": 4}
# Below this the test would be about row 0 of verify only.
MIN_TOKENS_PER_STEP = 1.3

# Temperature, top-p, top-k, min-p.
SAMPLING_CASES = (
    (1.0, 1.0, -1, 0.0),
    (0.8, 0.9, -1, 0.0),
    (1.2, 1.0, 20, 0.02),
    (0.7, 0.95, 40, 0.0),
)

Prompts = list[list[int]]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]
both_models = pytest.mark.parametrize("model", MODELS)
nano_deepseek = pytest.mark.parametrize("model", ["nano-deepseek"])


@dataclass(frozen=True)
class Difference:
    """The first token that two replies to one prompt do not share."""

    prompt: list[int]
    shared: list[int]
    tokens: tuple[int, int]

    def describe(self, reference: ReferenceModel) -> str:
        return f"after {len(self.shared)} tokens {self.tokens}, fp32 gap {self.gap(reference):.2e}"

    def gap(self, reference: ReferenceModel) -> float:
        """How much less likely than the best token the worse of the two is, in fp32 nats."""
        logprobs = reference.logprobs([*self.prompt, *self.shared])[-1]
        return float(logprobs.max() - logprobs[list(self.tokens)].min())


def differences(
    prompts: Prompts, expected: Sequence[Reply], found: Sequence[Reply]
) -> list[Difference]:
    """`found` may be shorter than `expected`, never longer."""
    result = []
    for prompt, a, b in zip(prompts, expected, found, strict=True):
        pairs = list(zip(a.tokens, b.tokens, strict=False))
        index = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if index is not None:
            result.append(Difference(prompt, a.tokens[:index], pairs[index]))
    return result


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, NUM_PROMPTS)


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path) -> list[LaunchedServer]:
    """fp32, without and with speculation, with an empty radix cache."""
    return servers.get_flushed(*plain_and_mtp(model_folder))


@both_models
def test_greedy_tokens_do_not_change(
    pair: list[LaunchedServer], prompts: Prompts, model: str, reference: ReferenceModel
) -> None:
    plain, mtp = pair
    prompts = prompts[:: GREEDY_STRIDE[model]]
    assert plain.info()["disable_overlap_schedule"] is False
    assert mtp.info()["disable_overlap_schedule"] is False
    expected, at_16 = ask_both(
        pair, lambda server: server.generate_each(prompts, greedy(NEW_TOKENS[model]), 16)
    )
    alone = mtp.generate_each(prompts, greedy(NEW_TOKENS_ALONE[model]), 1)

    assert len({tuple(prompt) for prompt in prompts}) == NUM_PROMPTS // GREEDY_STRIDE[model]
    assert all(len(reply.tokens) == NEW_TOKENS[model] for reply in expected + at_16)
    for found in (at_16, alone):
        wrong = differences(prompts, expected, found)
        assert not wrong, [difference.describe(reference) for difference in wrong]
    assert max(mtp.logged_batch_sizes("Decode")) >= 16
    assert sum(reply.cached_tokens > 0 for reply in alone) > len(prompts) // 2
    print(
        f"tokens per step: {tokens_per_step(at_16):.2f} at 16, {tokens_per_step(alone):.2f} alone"
    )
    assert tokens_per_step(at_16) > MIN_TOKENS_PER_STEP


@both_models
def test_a_reply_ends_where_it_ends_without_speculation(
    pair: list[LaunchedServer], prompts: Prompts
) -> None:
    """Accepted drafts behind an end token, a stop string or the length limit are not shown."""
    sampling = {"temperature": 0, "max_new_tokens": 30, "stop": ["\n\n", " the"]}
    expected, found = ask_both(
        pair, lambda server: server.generate_each(prompts[:32], sampling, 16)
    )
    reasons = {reply.meta["finish_reason"]["type"] for reply in expected}
    assert reasons == {"length", "stop"}
    for a, b in zip(expected, found, strict=True):
        assert (a.tokens, a.text, a.meta["finish_reason"]) == (
            b.tokens,
            b.text,
            b.meta["finish_reason"],
        )


@both_models
def test_a_grammar_constrains_the_same_tokens(pair: list[LaunchedServer], prompts: Prompts) -> None:
    sampling = greedy(12) | {"regex": r"(yes|no), [a-z]{4,9} [0-9]{3}", "ignore_eos": False}
    expected, found = ask_both(pair, lambda server: server.generate_each(prompts[:16], sampling, 8))
    assert [reply.text for reply in expected] == [reply.text for reply in found]
    assert [reply.tokens for reply in expected] == [reply.tokens for reply in found]
    assert all(reply.text.startswith(("yes, ", "no, ")) for reply in found)


@nano_deepseek
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_verifier_is_found(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    reference: ReferenceModel,
    mistake: str,
) -> None:
    """The control: a server with one mistake says what the model would not, in fp32 and also
    judged with the allowance for bf16."""
    server = servers.get(*broken_verifiers(model_folder))[MISTAKES.index(mistake)]
    chosen = prompts[:16]
    replies = server.generate(chosen, greedy(24))
    wrong = 0
    for prompt, reply in zip(chosen, replies, strict=True):
        rows = reference.rows([*prompt, *reply.tokens]).of_output(len(prompt))
        wrong += rows.top_tokens[:, 0].tolist() != reply.tokens
    assert wrong >= len(chosen) // 4
    outputs = [reply.tokens for reply in replies]
    with pytest.raises(AssertionError):
        Oracle(model_folder).check_greedy(chosen, outputs)


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize(
    "model", ["nano-deepseek", pytest.param("smollm2-mtp", marks=pytest.mark.slow)]
)
def test_in_bf16_only_ties_differ(
    servers: ServerPool, model_folder: Path, prompts: Prompts, model: str, dtype: str
) -> None:
    """Judged without the servers' own rounding: every token, of both, is transformers' in bf16 or
    one that bf16 does not tell from it there. At most half of the replies differ (seen: a sixth
    of nano-deepseek's, a third of smollm2's)."""
    pair = servers.get(*plain_and_mtp(model_folder, dtype=dtype))
    chosen = prompts[:: 3 if model == "smollm2-mtp" else 5]
    answers = ask_both(
        pair, lambda server: server.generate_each(chosen, greedy(NEW_TOKENS[model]), 16)
    )
    oracle = Oracle(model_folder)
    for replies in answers:
        oracle.check_greedy(chosen, [reply.tokens for reply in replies])
    num_differing = len(differences(chosen, *answers))
    print(f"{num_differing} of {len(chosen)} replies differ")
    assert 2 * num_differing <= len(chosen)


@nano_deepseek
def test_seeded_samples_do_not_change(
    pair: list[LaunchedServer], prompts: Prompts, reference: ReferenceModel
) -> None:
    """Neither with speculation nor with company: verify draws row j with the request's seed at the
    position where plain decode would."""
    chosen = prompts[::4]
    samplings = [
        greedy(16)
        | {"temperature": t, "top_p": top_p, "top_k": top_k, "min_p": min_p, "sampling_seed": seed}
        for seed in range(len(chosen))
        for t, top_p, top_k, min_p in [SAMPLING_CASES[seed % len(SAMPLING_CASES)]]
    ]
    expected, found = ask_both(pair, lambda server: server.generate(chosen, samplings))
    wrong = differences(chosen, expected, found)
    assert not wrong, [difference.describe(reference) for difference in wrong]
    assert sum(reply.meta["spec_num_correct_drafts"] for reply in found) > len(chosen)

    alone = [pair[1].generate([p], s)[0] for p, s in list(zip(chosen, samplings, strict=True))[:8]]
    unseeded = {"temperature": 1.0, "max_new_tokens": 16}
    company = [{**unseeded, "ignore_eos": True}] * 8 + samplings[:8]
    crowded = pair[1].generate([*chosen[8:16], *chosen[:8]], company)[8:]
    assert not differences(chosen[:8], expected[:8], alone)
    assert not differences(chosen[:8], expected[:8], crowded)
    # The control: another seed, another reply; so the replies above were samples.
    reseeded = [sampling | {"sampling_seed": 1000 + i} for i, sampling in enumerate(samplings)]
    assert len(differences(chosen, expected, pair[1].generate(chosen, reseeded))) > len(chosen) // 2


@both_models
@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 2, 7, 15])
def test_every_chain_length_is_lossless(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    reference: ReferenceModel,
    num_steps: int,
) -> None:
    pair = servers.get(
        *plain_and_mtp(model_folder, mtp_flags=("--speculative-num-steps", str(num_steps)))
    )
    expected, found = ask_both(pair, lambda server: server.generate_each(prompts, greedy(40), 16))
    wrong = differences(prompts, expected, found)
    assert not wrong, [difference.describe(reference) for difference in wrong]
