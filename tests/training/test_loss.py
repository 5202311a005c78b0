"""Invariant: the loss is sum_k alpha_k * D_k with alpha_k proportional to 0.6^k, summing to 1, and
every distance D equals a loop over rows and vocabulary in Python's floats."""

import math
from itertools import pairwise

import pytest
import torch

from sglang_ascend.training.loss import (
    LOSSES,
    LossConfig,
    Teacher,
    chain_loss,
    on_policy_weights,
    step_weights,
)

VOCABULARY = 10


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_step_weights_sum_to_one_and_fall_by_the_decay(num_steps):
    weights = step_weights(num_steps)
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    for earlier, later in pairwise(weights):
        assert later / earlier == pytest.approx(0.6, abs=1e-12)


def test_three_step_weights_are_the_published_ones():
    assert [round(weight, 2) for weight in step_weights(3)] == [0.51, 0.31, 0.18]


def example():
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 6, 4, generator=generator) for _ in range(2)]
    hidden = torch.randn(2, 7, 4, generator=generator)
    tokens = torch.randint(VOCABULARY, (2, 7), generator=generator)
    head = torch.randn(VOCABULARY, 4, generator=generator)
    rows = (torch.tensor([0, 1, 1]), torch.tensor([3, 2, 5]))
    return outputs, hidden, tokens, rows, head


def softmax(logits):
    powers = [math.exp(value) for value in logits]
    return [power / sum(powers) for power in powers]


def distance(kind, p, q, label, share):
    """One row's, in Python's floats; `share` is KL's in the hybrid."""
    acceptance = sum(min(a, b) for a, b in zip(p, q, strict=True))
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return {
        "ce": -math.log(q[label]),
        "kl": divergence,
        "tv": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        "lk": -math.log(acceptance),
        "hybrid": share * divergence - (1 - share) * math.log(acceptance),
    }[kind]


def distances(kind, outputs, hidden, tokens, rows, head, eta=3.0, draft_head=None):
    """The mean over the rows for each step, element by element."""
    draft_head = head if draft_head is None else draft_head
    means = []
    for step, output in enumerate(outputs, start=1):
        cases = []
        for sequence, position in zip(*(part.tolist() for part in rows), strict=True):
            q = softmax((draft_head.double() @ output[sequence, position - step].double()).tolist())
            p = softmax((head.double() @ hidden[sequence, position].double()).tolist())
            cases.append((p, q, tokens[sequence, position + 1].item()))
        overlaps = [sum(map(min, p, q)) for p, q, _ in cases]
        share = math.exp(-eta * sum(overlaps) / len(overlaps))
        means.append(sum(distance(kind, *case, share) for case in cases) / len(cases))
    return means


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_equals_a_loop_over_rows_and_steps(kind):
    outputs, hidden, tokens, rows, head = example()
    config = LossConfig(2, 0.6, kind, hidden_weight=0.0)
    every = torch.arange(VOCABULARY)
    total, losses = chain_loss(outputs, hidden, tokens, rows, (head, head), every, config)
    expected = distances(kind, outputs, hidden, tokens, rows, head)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert total.item() == pytest.approx((expected[0] + 0.6 * expected[1]) / 1.6, rel=1e-5)
    misaligned = distances(kind, outputs[::-1], hidden, tokens, rows, head)
    assert losses != pytest.approx(misaligned, rel=1e-2)
    others = [LossConfig(2, 0.6, other, hidden_weight=0.0) for other in LOSSES if other != kind]
    for other in others:  # control: no two distances are the same
        wrong = chain_loss(outputs, hidden, tokens, rows, (head, head), every, other)[0]
        assert total.item() != pytest.approx(wrong.item(), rel=1e-3)


def test_drafts_may_have_a_head_of_their_own():
    """Of another width too, as a draft model's is."""
    outputs, hidden, tokens, rows, head = example()
    generator = torch.Generator().manual_seed(5)
    outputs = [output[..., :-1] for output in outputs]
    own = torch.randn(len(head), head.shape[1] - 1, generator=generator)
    config, every = LossConfig(2, kind="kl", hidden_weight=0.0), torch.arange(VOCABULARY)
    _, losses = chain_loss(outputs, hidden, tokens, rows, (head, own), every, config)
    expected = distances("kl", outputs, hidden, tokens, rows, head, draft_head=own)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_gradient_is_that_of_the_distance(kind):
    """By central differences in float64; the hybrid's share is a constant, so it is left out of
    them by eta = 0, where the share is 1 whatever the drafts are."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)
    probs = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64).softmax(-1)
    teacher = Teacher(torch.tensor([4, 0, 9]), probs)

    def value(x):
        return LOSSES[kind](x.log_softmax(-1), teacher, 0.0)

    assert torch.autograd.gradcheck(value, logits.requires_grad_())


def test_every_distance_to_the_target_itself_is_least_where_the_draft_equals_it():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(50, VOCABULARY, generator=generator, dtype=torch.float64)
    teacher = Teacher(logits.argmax(-1), logits.softmax(-1))
    wrong = (logits + torch.randn(logits.shape, generator=generator)).log_softmax(-1)
    for kind in LOSSES.keys() - {"ce"}:
        same = LOSSES[kind](logits.log_softmax(-1), teacher, 3.0)
        assert same.abs().max() < 1e-12
        assert (LOSSES[kind](wrong, teacher, 3.0) > 1e-4).all()


def test_a_loss_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="--loss mse is none of ce, kl, tv, lk, hybrid"):
        LossConfig(kind="mse")


def test_labels_are_found_in_a_restricted_vocabulary():
    outputs, hidden, tokens, rows, head = example()
    vocabulary = torch.cat([tokens[rows[0], rows[1] + 1], torch.tensor([0, 9])]).unique()
    config = LossConfig(2, 0.6, "ce", hidden_weight=0.0)
    part = head[vocabulary]
    _, losses = chain_loss(outputs, hidden, tokens, rows, (part, part), vocabulary, config)
    full = distances("ce", outputs, hidden, tokens, rows, head)
    assert all(value <= whole + 1e-6 for value, whole in zip(losses, full, strict=True))


def verified_drafts(tokens, drafts, trained, num_steps):
    """Drafts that a server verifies which begins a chain at every slot: {(row, step): accepted}."""
    verified = {}
    for slot in range(len(tokens) - 2):
        for step in range(1, num_steps + 1):
            position = slot + step  # drafts token position + 1
            if (position, step) not in drafts or position not in trained:
                break
            verified[position, step] = drafts[position, step] == tokens[position + 1]
            if not verified[position, step]:
                break
    return verified


@pytest.mark.parametrize("seed", range(20))
def test_on_policy_rows_are_those_that_verification_reaches(seed):
    """Against a walk along every chain; 20 random texts of two tokens, some of them not trained."""
    generator = torch.Generator().manual_seed(seed)
    num_steps, length, replay = 3, 24, 2.5
    tokens = torch.randint(2, (2, length), generator=generator)
    trained = torch.rand(2, length, generator=generator) < 0.9
    trained[:, : num_steps + 1] = False
    sequence, following = trained.nonzero(as_tuple=True)
    rows = (sequence, following - 1)
    labels = tokens[rows[0], following]
    drafts = torch.randint(2, (num_steps, len(labels)), generator=generator)
    accepted = [row == labels for row in drafts]
    weights = on_policy_weights(accepted, rows, (2, length), replay)
    places = list(zip(*(part.tolist() for part in rows), strict=True))
    for number in range(2):
        own = {place: row for row, (owner, place) in enumerate(places) if owner == number}
        made = {
            (place, step): int(drafts[step - 1, row])
            for place, row in own.items()
            for step in range(1, num_steps + 1)
        }
        verified = verified_drafts(tokens[number].tolist(), made, own, num_steps)
        for place, step in made:
            right = verified.get((place, step))
            expected = 0.0 if right is None else 1.0 if right else replay
            assert weights[step - 1][own[place]] == expected, (place, step)
    assert any(0 < (weight == 0).sum() < len(labels) for weight in weights)


def test_on_policy_the_loss_is_the_mean_over_what_is_verified():
    """With rejected drafts counted as others: the losses of the rows that are reached alone; and
    control: rows all alike give another."""
    outputs, hidden, tokens, rows, head = example()
    rows = (torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 4, 5, 2, 3]))
    outputs = [output.clone() for output in outputs]
    for sequence, position in zip(*(part.tolist() for part in rows[:2]), strict=True):
        if (sequence, position) != (0, 4):  # all first drafts are right but one
            label = int(tokens[sequence, position + 1])
            outputs[0][sequence, position - 1] = 50 * head[label] / head[label].norm()
    vocabulary = torch.arange(VOCABULARY)
    config = LossConfig(num_steps=2, hidden_weight=0, replay=1.0)
    _, losses = chain_loss(
        outputs, hidden, tokens, rows, (head, head), vocabulary, config, on_policy=True
    )
    _, alike = chain_loss(outputs, hidden, tokens, rows, (head, head), vocabulary, config)
    first = outputs[0][rows[0], rows[1] - 1] @ head.T
    right = (first.argmax(-1) == tokens[rows[0], rows[1] + 1]).tolist()
    chains = {
        (s, p - 1): ok for s, p, ok in zip(rows[0].tolist(), rows[1].tolist(), right, strict=True)
    }
    reached = [
        row
        for row, (s, p) in enumerate(zip(rows[0].tolist(), rows[1].tolist(), strict=True))
        if chains.get((s, p - 2))
    ]
    assert 0 < len(reached) < len(right)
    few = (rows[0][reached], rows[1][reached])
    _, alone = chain_loss(outputs, hidden, tokens, few, (head, head), vocabulary, config)
    assert losses[1] == pytest.approx(alone[1], rel=1e-5)
    assert losses[0] == pytest.approx(alike[0], rel=1e-5)
    assert losses[1] != pytest.approx(alike[1], rel=1e-2)
