"""Chain operators: a step's rows and its draft decodes lie where the tokens will, and verification
keeps exactly what the target said: the output's distribution is the target's.

Distributions are enumerated with exact fractions over a tiny vocabulary, never sampled.
"""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch

from sglang_ascend.ops import chain

VOCABULARY = range(3)


@pytest.fixture(params=["reference", "numba", "triton"], autouse=True)
def body(request, monkeypatch, triton_interpreter):
    """Every test here runs on each implementation; Triton's in its interpreter, without a GPU."""
    for name in ("prepare_step", "verify_chain", "place_draft_decode"):
        op = getattr(chain, name)
        present = request.param in op._implementations
        monkeypatch.setattr(
            chain, name, op.implementation(request.param if present else "reference")
        )


STARTS, ROWS = [1, 0, 33, 17, 34], [5, 0, 7, 2, 3]


def slot_lists(max_context_len: int) -> torch.Tensor:
    """int32 [8, max_context_len]: distinct slots, in no order."""
    generator = torch.Generator().manual_seed(max_context_len)
    return torch.randperm(8 * max_context_len, generator=generator).view(8, -1).int()


def prepared(num_steps: int, req_to_token: torch.Tensor, page_size: int = 1):
    return chain.prepare_step(
        torch.tensor(STARTS),
        torch.tensor(ROWS),
        req_to_token,
        torch.arange(max(1, 2 * num_steps)),
        max(STARTS) + max(1, 2 * num_steps),
        page_size,
    )


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 15])
def test_a_step_is_prepared_from_the_committed_lengths(num_steps):
    """Oracle: one request and one position at a time."""
    req_to_token = slot_lists(80)
    inputs = prepared(num_steps, req_to_token)
    lists = [req_to_token[row].tolist() for row in ROWS]
    places = [
        (start + j, row)
        for start, row in zip(STARTS, lists, strict=True)
        for j in range(num_steps + 1)
    ]
    assert inputs.positions.tolist() == [position for position, _ in places]
    assert inputs.row_slots.tolist() == [row[position] for position, row in places]
    for request, (start, row) in enumerate(zip(STARTS, lists, strict=True)):
        reach = start + max(1, 2 * num_steps)
        assert inputs.slots[request].tolist() == row[start:reach]
        assert inputs.kv_lens[request] == start + num_steps + 1
        assert inputs.block_table[request, :reach].tolist() == row[:reach]
    indices = (inputs.positions, inputs.row_slots, inputs.slots, inputs.kv_lens)
    assert {tensor.dtype for tensor in indices} == {torch.int64}


@pytest.mark.parametrize("page_size", [1, 4, 17])
def test_the_one_row_of_a_step_without_drafts_has_its_page(page_size):
    """Also where it begins one: a request of 34 tokens in pages of 17."""
    slots = slot_lists(85 // page_size)[:, :, None] * page_size + torch.arange(page_size)
    inputs = prepared(0, slots.flatten(1).int(), page_size)
    for request, start in enumerate(STARTS):
        page = int(inputs.block_table[request, start // page_size])
        assert page * page_size + start % page_size == int(inputs.row_slots[request])


@pytest.mark.parametrize("page_size", [4, 16])
def test_the_block_table_names_pages_where_slots_come_in_pages(page_size):
    """Oracle: the slot of every position, found through its page."""
    pages = slot_lists(80 // page_size)
    slots = pages[:, :, None] * page_size + torch.arange(page_size)
    req_to_token = slots.flatten(1).int()
    inputs, by_slot = prepared(3, req_to_token, page_size), prepared(3, req_to_token)
    assert inputs.page_size == page_size
    for request, (start, row) in enumerate(zip(STARTS, req_to_token[ROWS].tolist(), strict=True)):
        for position in range(start + 6):
            page = int(inputs.block_table[request, position // page_size])
            assert page * page_size + position % page_size == row[position]
    for name in ("positions", "row_slots", "slots", "kv_lens"):
        assert torch.equal(getattr(inputs, name), getattr(by_slot, name)), name


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_lies_behind_a_requests_own_pages_is_not_read(page_size):
    """Of a table as wide as the model's context only the own part may cost anything; what the
    scheduler left behind it, here no slot at all, is not handed on."""
    req_to_token = slot_lists(80)
    wanted = prepared(3, req_to_token, page_size).block_table
    for start, row in zip(STARTS, ROWS, strict=True):
        if ROWS.count(row) == 1:
            req_to_token[row, start + 6 :] = -(2**30)
    found = prepared(3, req_to_token, page_size).block_table
    assert torch.equal(found, wanted)
    for request, start in enumerate(STARTS):
        own_pages = -(-(start + 6) // page_size)
        assert not found[request, own_pages:].any()
        assert found[request, :own_pages].sum() == wanted[request, :own_pages].sum() > 0


def fields_that_follow_the_scheduler(prepare) -> set[str]:
    """Fields of a prepared step that change when the scheduler writes what it was made from.

    After ``publish`` it does, for the next step, while this one still runs.
    """
    seq_lens, rows, req_to_token = torch.tensor(STARTS), torch.tensor(ROWS), slot_lists(80)
    inputs = prepare(seq_lens, rows, req_to_token, torch.arange(6), max(STARTS) + 6)
    tensors = {name: value for name, value in vars(inputs).items() if name != "page_size"}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for written in (seq_lens, rows, req_to_token):
        written.fill_(-1)
    return {name for name, tensor in tensors.items() if not torch.equal(before[name], tensor)}


def test_a_prepared_step_does_not_follow_the_scheduler():
    assert fields_that_follow_the_scheduler(chain.prepare_step) == set()


def test_a_prepared_view_would_be_seen():
    """The control: a block table that is the scheduler's own memory, and lengths in place."""

    def prepare_views(seq_lens, rows, req_to_token, offsets, max_kv_len):
        inputs = chain.prepare_step(seq_lens, rows, req_to_token, offsets, max_kv_len)
        return replace(inputs, block_table=req_to_token[:5, :max_kv_len], kv_lens=seq_lens.add_(4))

    assert fields_that_follow_the_scheduler(prepare_views) == {"block_table", "kv_lens"}


@pytest.mark.parametrize("num_steps", [1, 2, 3, 15])
def test_draft_decodes_follow_the_last_kept_token(num_steps):
    req_to_token = slot_lists(80)
    inputs = prepared(num_steps, req_to_token)
    accept_lens = torch.tensor([1, num_steps + 1, 1 + num_steps // 2, num_steps, 2])
    rows = chain.place_draft_decode(
        torch.tensor(STARTS) + accept_lens,
        accept_lens.int(),
        inputs.slots,
        torch.arange(num_steps)[:, None],
    )
    assert rows.positions.shape == rows.slots.shape == rows.kv_lens.shape == (num_steps - 1, 5)
    for request, (start, row) in enumerate(zip(STARTS, ROWS, strict=True)):
        for j in range(num_steps - 1):
            position = start + int(accept_lens[request]) + j
            assert rows.positions[j, request] == position
            assert rows.slots[j, request] == req_to_token[row, position]
            assert rows.kv_lens[j, request] == position + 1


@cache
def accept_lens_of_all_pairs(body, num_steps: int) -> dict:
    """Kept tokens of every (sampled, drafted) pair of three tokens, verified as one batch."""
    pairs = list(
        product(product(VOCABULARY, repeat=num_steps + 1), product(VOCABULARY, repeat=num_steps))
    )
    sampled = torch.tensor([pair[0] for pair in pairs])
    drafted = torch.tensor([pair[1] for pair in pairs])
    accept_lens = body(sampled, drafted)
    assert accept_lens.dtype == torch.int32
    return dict(zip(pairs, accept_lens.tolist(), strict=True))


def verify(sampled: tuple[int, ...], drafted: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that one request emits."""
    accept_lens = accept_lens_of_all_pairs(chain.verify_chain, len(drafted))
    return sampled[: accept_lens[sampled, drafted]]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_every_small_chain_keeps_its_longest_agreed_prefix_and_one_more(num_steps):
    """Brute force over all (sampled, drafted) pairs."""
    for (sampled, drafted), accept_len in accept_lens_of_all_pairs(
        chain.verify_chain, num_steps
    ).items():
        agreed = 0
        while agreed < num_steps and sampled[agreed] == drafted[agreed]:
            agreed += 1
        assert accept_len == agreed + 1


@pytest.mark.parametrize("num_steps", [1, 3, 15])
def test_rows_may_lie_apart_and_a_chain_may_be_long(num_steps):
    """Both are windows of wider tensors, as the sampler and the draft leave them."""
    generator = torch.Generator().manual_seed(num_steps)
    sampled = torch.randint(7, (40, num_steps + 3), generator=generator)[:, 1 : num_steps + 2]
    drafted = torch.full((40, num_steps + 2), -1)[:, 1 : num_steps + 1]
    agreed = [request % (num_steps + 1) for request in range(40)]
    for request, length in enumerate(agreed):
        drafted[request, :length] = sampled[request, :length]
    accept_lens = chain.verify_chain(sampled, drafted)
    assert accept_lens.tolist() == [length + 1 for length in agreed]


def test_an_empty_batch_has_nothing_to_verify():
    nothing = torch.empty(0, 4, dtype=torch.int64)
    assert chain.verify_chain(nothing, nothing[:, 1:]).shape == (0,)


def target(prefix: tuple[int, ...]) -> list[Fraction]:
    """An autoregressive model of three tokens: every prefix has its own skewed distribution."""
    state = 1
    for token in prefix:
        state = (5 * state + token + 1) % 23
    weights = [1 + state % 3, 1 + state % 5, 1 + (state * state) % 7]
    return [Fraction(weight, sum(weights)) for weight in weights]


def draft(prefix: tuple[int, ...], num_steps: int) -> tuple[int, ...]:
    """A deterministic draft, right more often than not but far from always."""
    tokens: tuple[int, ...] = ()
    for _ in range(num_steps):
        probabilities = target(prefix + tokens)
        best = max(VOCABULARY, key=lambda token: probabilities[token])
        wrong = (sum(prefix + tokens) + len(tokens)) % 3 == 0
        tokens += ((best + wrong) % 3,)
    return tokens


def own_draws(sampled, drafted, row_probabilities):
    """The shipped rule: [(emitted tokens, probability)]."""
    return [(verify(sampled, drafted), Fraction(1))]


def accept_always(sampled, drafted, row_probabilities):
    """Broken: the draft is emitted whatever the target drew."""
    return [(drafted + sampled[-1:], Fraction(1))]


def bonus_from_row_0(sampled, drafted, row_probabilities):
    """Broken: the token after the accepted ones is always the first row's."""
    return [(verify(sampled, drafted)[:-1] + sampled[:1], Fraction(1))]


def redraw_the_rejected_row(sampled, drafted, row_probabilities):
    """Broken: a rejected row is drawn once more, unconditionally, which favours the draft."""
    emitted = verify(sampled, drafted)
    row = len(emitted) - 1
    if row == len(drafted):
        return [(emitted, Fraction(1))]
    return [((*emitted[:-1], token), row_probabilities[row][token]) for token in VOCABULARY]


def distribution_of_output(rule, num_steps: int, num_tokens: int) -> dict:
    """Exact joint distribution of the first ``num_tokens`` over as many steps as they take."""
    finished: dict[tuple[int, ...], Fraction] = {}
    unfinished = {(): Fraction(1)}
    while unfinished:
        prefix, mass = unfinished.popitem()
        drafted = draft(prefix, num_steps)
        rows = [target(prefix + drafted[:row]) for row in range(num_steps + 1)]
        for sampled in product(VOCABULARY, repeat=num_steps + 1):
            drawn = mass
            for row, token in enumerate(sampled):
                drawn *= rows[row][token]
            for emitted, share in rule(sampled, drafted, rows):
                output = (prefix + emitted)[:num_tokens]
                pool = finished if len(output) == num_tokens else unfinished
                pool[output] = pool.get(output, Fraction(0)) + drawn * share
    return finished


def distribution_of_target(num_tokens: int) -> dict:
    """The same without speculation: one token after another."""
    expected = {}
    for tokens in product(VOCABULARY, repeat=num_tokens):
        probability = Fraction(1)
        for position, token in enumerate(tokens):
            probability *= target(tokens[:position])[token]
        expected[tokens] = probability
    return expected


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_output_has_the_distribution_of_the_target_exactly(num_steps):
    output = distribution_of_output(own_draws, num_steps, num_tokens=4)
    assert output == distribution_of_target(4)


@pytest.mark.parametrize("rule", [accept_always, bonus_from_row_0, redraw_the_rejected_row])
@pytest.mark.parametrize("num_steps", [2, 3])
def test_a_broken_verifier_has_another_distribution(rule, num_steps):
    output = distribution_of_output(rule, num_steps, num_tokens=3)
    assert sum(output.values()) == 1
    expected = distribution_of_target(3)
    distance = sum(abs(expected[t] - output.get(t, Fraction(0))) for t in expected) / 2
    assert distance > Fraction(1, 20), "total variation: far enough for a sampled test to see"


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_drafts_of_this_test_are_both_accepted_and_rejected(num_steps):
    """Else equality above would say nothing about one of the two paths."""
    lengths = set()
    for prefix in product(VOCABULARY, repeat=2):
        drafted = draft(prefix, num_steps)
        for sampled in product(VOCABULARY, repeat=num_steps + 1):
            lengths.add(len(verify(sampled, drafted)))
    assert lengths == set(range(1, num_steps + 2))
