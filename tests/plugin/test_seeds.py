"""A request's seed is its own in any company, and rows without one have seeds that nobody knows."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]


def batch(*seeds: int | None) -> SimpleNamespace:
    reqs = [
        SimpleNamespace(rid=f"{row}: {seed}", sampling_params=SimpleNamespace(sampling_seed=seed))
        for row, seed in enumerate(seeds)
    ]
    info = SimpleNamespace(sampling_seed=None, device="cpu")
    return SimpleNamespace(reqs=reqs, sampling_info=info)


@pytest.fixture
def seeds():
    from sglang_ascend.plugin.requests.seeds import RequestSeeds

    return RequestSeeds()


def given(seeds, *args) -> list[int] | None:
    return given_to(seeds, batch(*args))


def given_to(seeds, served) -> list[int] | None:
    seeds.give(served)
    found = served.sampling_info.sampling_seed
    return None if found is None else found.tolist()


def test_rows_have_their_requests_seeds_whoever_came_before(seeds):
    assert given(seeds, 7, 2**62 + 1) == [7, 2**62 + 1]
    assert given(seeds, 8, 7) == [8, 7]
    assert given(seeds, None, None) is None
    assert given(seeds, 7) == [7]


def test_a_row_without_one_has_one_that_nobody_knows_and_keeps_it(seeds):
    served = batch(7, None)
    first, drawn = given_to(seeds, served)
    assert first == 7 and drawn not in (7, 42)
    assert given_to(seeds, served) == [7, drawn]
    assert given(type(seeds)(), 7, None)[1] != drawn


def test_rows_keep_the_seeds_of_deterministic_inference(seeds):
    """By which a request without a seed has the same tokens in any company."""
    served = batch(7, None)
    served.sampling_info.sampling_seed = torch.tensor([7, 42])
    assert given_to(seeds, served) == [7, 42]


def test_a_request_with_the_id_of_another_has_its_own_seed(seeds):
    for seed in (1, 2, None, 1):
        served = batch(seed)
        served.reqs[0].rid = "the client's"
        assert given_to(seeds, served) == (None if seed is None else [seed])


def test_the_mask_of_a_seeded_draw_holds_what_its_filters_left():
    from sglang_ascend.plugin.requests.seeds import SeededSampler

    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    info = SimpleNamespace(
        top_ks=torch.tensor([2, 1]),
        top_ps=torch.ones(2),
        min_ps=torch.zeros(2),
        sampling_seed=torch.tensor([1, 2]),
        sampling_mask_batch_indices=torch.tensor([1]),
    )
    positions = torch.tensor([4, 5])
    tokens, mask = SeededSampler._sample_from_probs(MagicMock(), probs, info, positions, False)
    assert tokens[1] == 2 and tokens[0] in (0, 1)
    assert (mask.weights > 0).tolist() == [[False, False, True]]
    assert mask.selected_weight.tolist() == mask.weights[:, 2].tolist()
