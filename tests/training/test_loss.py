"""Invariant: the loss is sum_k alpha_k * CE_k with alpha_k proportional to 0.6^k, summing to 1."""

import math
from itertools import pairwise

import pytest
import torch

from sglang_ascend.training.loss import LossConfig, chain_loss, step_weights


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
    tokens = torch.randint(10, (2, 7), generator=generator)
    head = torch.randn(10, 4, generator=generator)
    rows = (torch.tensor([0, 1, 1]), torch.tensor([3, 2, 5]))
    return outputs, hidden, tokens, rows, head


def cross_entropies(outputs, hidden, tokens, rows, head, soft):
    """Element by element, in Python floats."""
    means = []
    for step, output in enumerate(outputs, start=1):
        values = []
        for sequence, position in zip(*(part.tolist() for part in rows), strict=True):
            logits = (head @ output[sequence, position - step]).tolist()
            total = math.log(sum(math.exp(value) for value in logits))
            teacher = (head @ hidden[sequence, position]).tolist()
            norm = sum(math.exp(value) for value in teacher)
            label = tokens[sequence, position + 1].item()
            weights = [math.exp(value) / norm for value in teacher]
            if not soft:
                weights = [float(index == label) for index in range(10)]
            values.append(sum(w * (total - x) for w, x in zip(weights, logits, strict=True)))
        means.append(sum(values) / len(values))
    return means


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_equals_a_loop_over_rows_and_steps(soft):
    outputs, hidden, tokens, rows, head = example()
    config = LossConfig(2, 0.6, hard_weight=1.0 - soft, soft_weight=float(soft), hidden_weight=0.0)
    total, losses = chain_loss(outputs, hidden, tokens, rows, head, torch.arange(10), config)
    expected = cross_entropies(outputs, hidden, tokens, rows, head, soft)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert total.item() == pytest.approx((expected[0] + 0.6 * expected[1]) / 1.6, rel=1e-5)
    misaligned = cross_entropies(outputs[::-1], hidden, tokens, rows, head, soft)
    assert losses != pytest.approx(misaligned, rel=1e-2)


def test_labels_are_found_in_a_restricted_vocabulary():
    outputs, hidden, tokens, rows, head = example()
    vocabulary = torch.cat([tokens[rows[0], rows[1] + 1], torch.tensor([0, 9])]).unique()
    config = LossConfig(2, 0.6, hard_weight=1.0, soft_weight=0.0, hidden_weight=0.0)
    part = head[vocabulary]
    _, losses = chain_loss(outputs, hidden, tokens, rows, part, vocabulary, config)
    full = cross_entropies(outputs, hidden, tokens, rows, head, soft=False)
    assert all(value <= whole + 1e-6 for value, whole in zip(losses, full, strict=True))
