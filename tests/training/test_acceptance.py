"""Invariant: the simulated acceptance equals drafting and verifying token by token."""

import random

import pytest
import torch
import torch.nn.functional as F

from sglang_ascend.bench.figures.lookup import accepted_counts, lookup_matches, repeat_share
from sglang_ascend.training.acceptance import Output, draft_matches, evaluate, is_looping
from sglang_ascend.training.interface import run_chain
from sglang_ascend.training.targets.layer import MTPLayer

VOCABULARY, SIZE, LENGTH, PROMPT = 6, 24, 150, 4


def serve(tokens, prompt_length, draft, num_steps):
    """Accepted drafts per verify of a server that emits `tokens`; `draft(known)` -> next token."""
    counts, known = [], prompt_length + 1
    while known + num_steps <= len(tokens):
        context, accepted = list(tokens[:known]), 0
        for _ in range(num_steps):
            guess = draft(context, known)
            if guess != tokens[len(context)]:
                break
            context.append(guess)
            accepted += 1
        counts.append(accepted)
        known += accepted + 1
    return counts


@pytest.fixture
def setting(tiny_target):
    generator = torch.Generator().manual_seed(1)
    layer = MTPLayer(tiny_target("MiMoForCausalLM"))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    hidden = torch.randn(LENGTH, SIZE, generator=generator)
    head = torch.randn(VOCABULARY, SIZE, generator=generator)
    return layer, Output("any", tokens, PROMPT, hidden), head


@torch.no_grad()
def test_simulation_equals_a_drafting_and_verifying_loop(setting):
    layer, output, head = setting

    def draft(context, known):
        """Reruns the chain from the slot of the last verified token on the drafted context."""
        tokens = torch.tensor(context)
        step = len(context) - known + 1
        hidden = F.pad(output.hidden[: known - 1], (0, 0, 0, len(context) - known + 1))
        chain = run_chain(layer, hidden[None], tokens[None], head, step)
        return int((head @ chain[step - 1][0, known - 2]).argmax())

    matches = draft_matches(layer, output, head, head, 3)
    counts = accepted_counts(matches, PROMPT)
    assert counts == serve(output.tokens.tolist(), PROMPT, draft, 3)
    assert 0 < sum(counts) < 3 * len(counts)

    def stale(context, known):
        return draft(context[:known], known)  # control: repeats the first draft at every step

    assert counts != serve(output.tokens.tolist(), PROMPT, stale, 3)


@torch.no_grad()
@pytest.mark.parametrize("with_context", [False, True])
def test_drafts_are_of_a_list_and_of_the_text_so_far(setting, with_context):
    layer, output, head = setting
    listed = [1, 4]
    tokens = output.tokens.clone()
    tokens[: LENGTH // 2] %= 3  # of which 0 and 2 are known when a draft first can be one of them
    output = Output("any", tokens, PROMPT, output.hidden)
    chain = run_chain(layer, output.hidden[None], tokens[None], head, 3)

    def draft(context, known, of_text):
        """Of the chain over the right tokens, for behind a wrong draft nothing is asked."""
        states = chain[len(context) - known][0, known - 2]
        allowed = sorted({*listed, *of_text})
        return allowed[int((head[allowed] @ states).argmax())]

    drafts = {
        True: lambda context, known: draft(context, known, context[:known]),
        False: lambda context, known: draft(context, known, []),
    }
    found = draft_matches(layer, output, head, head, 3, torch.tensor(listed), with_context)
    counts = accepted_counts(found, PROMPT)
    assert counts == serve(tokens.tolist(), PROMPT, drafts[with_context], 3)
    assert counts != serve(tokens.tolist(), PROMPT, drafts[not with_context], 3)


def test_prompt_lookup_equals_a_backward_search():
    rng = random.Random(0)
    tokens = [rng.randrange(3) for _ in range(80)]

    def draft(context, known):
        for end in range(known - 1, 1, -1):
            if context[end - 2 : end] == context[known - 2 : known]:
                source = end + len(context) - known
                return context[source] if source < known else None
        return None

    counts = accepted_counts(lookup_matches(tokens, 3), 5)
    assert counts == serve(tokens, 5, draft, 3)
    assert sum(counts) > 0


def test_repeat_share_counts_four_grams_seen_before():
    assert repeat_share([1, 2, 3, 4, 5, 6]) == 0.0
    assert repeat_share([7] * 9) == pytest.approx(5 / 6)
    assert repeat_share([1, 2]) == 0.0


def test_looping_outputs_are_reported_apart(setting):
    layer, output, head = setting
    tokens = torch.cat([output.tokens[:PROMPT], torch.ones(40, dtype=torch.long)])
    loop = Output("other", tokens, PROMPT, output.hidden[: len(tokens)])
    straight_tokens = torch.tensor(random.Random(3).choices(range(VOCABULARY), k=LENGTH))
    straight = Output("any", straight_tokens, PROMPT, output.hidden)
    assert is_looping(loop)
    assert not is_looping(straight)
    report = evaluate(layer, [straight, loop], head, head)
    counts = accepted_counts(draft_matches(layer, straight, head, head, 3), PROMPT)
    assert report["all"]["acceptance_length"] == round(1 + sum(counts) / len(counts), 3)
    assert report["all"]["loop_share"] == 0.5
    assert report["other"]["outputs"] == 0
    assert report["looping outputs"]["outputs"] == 1
