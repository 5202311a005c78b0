"""A seeded uniform number depends on its request, position and decision alone, and is uniform."""

import scipy.stats
import torch

from sglang_ascend.sampling.noise import Decision, uniform

NUM_NUMBERS = 20_000


def test_a_seeded_number_does_not_depend_on_its_neighbours():
    seeds, positions = torch.tensor([3, -7, 2**62]), torch.tensor([10, 10, 999])
    together = uniform(seeds, positions, Decision.DRAFT)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1], Decision.DRAFT) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(together.tolist())) == 3


def test_decisions_of_one_position_have_numbers_of_their_own():
    """Uniform each, and no pair correlated: 4 standard errors, on fixed seeds."""
    positions = torch.arange(NUM_NUMBERS)
    seeds = torch.full((NUM_NUMBERS,), 11)
    numbers = {decision: uniform(seeds, positions, decision).numpy() for decision in Decision}
    for values in numbers.values():
        assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3
    for a, b in [("DRAFT", "ACCEPT"), ("DRAFT", "BONUS"), ("ACCEPT", "BONUS")]:
        r = scipy.stats.pearsonr(numbers[Decision[a]], numbers[Decision[b]]).statistic
        assert abs(r) < 4 / NUM_NUMBERS**0.5


def test_without_a_seed_numbers_are_fresh():
    positions = torch.zeros(8, dtype=torch.int64)
    first, second = (uniform(None, positions, Decision.BONUS) for _ in range(2))
    assert not torch.equal(first, second)
    assert ((first >= 0) & (first < 1)).all()
