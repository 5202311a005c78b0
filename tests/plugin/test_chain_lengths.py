"""A step verifies as many drafts as the longest chain of its requests has, and counts those that
the MTP layer drafted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]


class Lookups:
    """Of a step's requests each chain that was looked up has so many drafts; 0 is the MTP
    layer's."""

    def __init__(self) -> None:
        self.drafts = SimpleNamespace(num_drafted=0)
        self.looked_up: list[int] = []

    def begin(self, batch: SimpleNamespace) -> list[int]:
        return self.looked_up

    def settle(self, accepted: list[int]) -> list[int]:
        return [n for n, of in zip(accepted, self.looked_up, strict=True) if of == 0]


def batch(*rows: int) -> SimpleNamespace:
    return SimpleNamespace(reqs=[None] * len(rows), req_pool_indices=torch.tensor(rows))


def test_a_lookup_makes_no_chain_of_the_mtp_layer_longer():
    from sglang_ascend.plugin.mtp.adaptive.chains import Chains
    from sglang_ascend.plugin.mtp.adaptive.lengths import EndedChains

    lookups = Lookups()
    chains = Chains(3, 9, ended=EndedChains(0.3, 4), lookups=lookups)
    lookups.looked_up = [0, 0]
    assert chains.begin(batch(0, 2)) == (1, 3)
    # The MTP layer drafts two tokens; of the other request eight are looked up.
    lookups.drafts.num_drafted = 2
    assert chains.end(torch.zeros(2, 9, dtype=torch.int64)).shape == (2, 9)
    assert chains.settle([1, 1]) == ([1, 1], 1)
    lookups.looked_up = [0, 8]
    assert chains.begin(batch(0, 2)) == (8, 3)
    lookups.drafts.num_drafted = 3
    chains.end(torch.zeros(2, 4, dtype=torch.int64))
    assert chains.settle([2, 7]) == ([2], 2)
    lookups.looked_up = [0]
    assert chains.begin(batch(0)) == (3, 3)
