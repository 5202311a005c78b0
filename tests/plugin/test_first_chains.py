"""Of which requests a prefill's hidden state is kept, for their first step; what is drafted by it
stands in tests/speculative/test_step.py, and that servers do so in test_accepted_steps.py."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.sglang

MODULE = "sglang_ascend.plugin.mtp.adaptive.first_chains"


class Request:
    """What a key of a weak dictionary is."""


@pytest.fixture
def chains(loaded_plugins, monkeypatch):
    """Of a server whose role and ranks the test may change."""
    from sglang_ascend.plugin.mtp.adaptive.first_chains import FirstChains

    server = SimpleNamespace(disaggregation_mode="null", ranks_share_rows=False)
    monkeypatch.setattr(f"{MODULE}.get_disagg", lambda: server)
    monkeypatch.setattr(f"{MODULE}.ranks_share_rows", lambda: server.ranks_share_rows)
    kept = FirstChains(None, None, [], None)
    kept.server = server
    return kept


def drafted(num_requests: int, has_hidden: bool = True) -> SimpleNamespace:
    hidden = torch.arange(num_requests * 4.0).view(num_requests, 4) if has_hidden else None
    return SimpleNamespace(hidden_states=hidden, topk_p=torch.full((num_requests, 1), 0.5))


def test_what_a_prefill_drafted_from_is_kept_of_each_request(chains):
    requests, given = [Request(), Request()], drafted(2)
    hidden = given.hidden_states
    chains.keep(requests, given, skipped=None)
    assert given.hidden_states is None, "no step is given them"
    assert list(chains.begun) == requests
    for i, request in enumerate(requests):
        of_request, likelihood = chains.begun[request]
        assert torch.equal(of_request, hidden[i]) and likelihood == 0.5


def test_a_later_chunk_that_skips_the_layer_leaves_nothing(chains):
    requests = [Request(), Request()]
    chains.keep(requests, drafted(2), skipped=None)
    chains.keep(requests[:1], drafted(1, has_hidden=False), skipped=object())
    assert list(chains.begun) == requests[1:]


def test_a_request_that_is_gone_is_forgotten(chains):
    requests = [Request(), Request()]
    chains.keep(requests, drafted(2, has_hidden=False), skipped=None)
    del requests[0]
    gc.collect()
    assert list(chains.begun) == requests


def test_what_is_sent_to_a_decode_server_is_left_alone(chains):
    chains.server.disaggregation_mode = "prefill"
    given = drafted(1)
    chains.keep([Request()], given, skipped=None)
    assert given.hidden_states is not None and not chains.begun


def test_ranks_that_share_rows_complete_no_chain(chains):
    chains.server.ranks_share_rows = True
    given = drafted(1)
    chains.keep([Request()], given, skipped=None)
    assert given.hidden_states is None and not chains.begun


def test_a_few_new_requests_among_many_keep_the_one_draft_of_their_prefill(chains):
    """So that the others do not wait; and the policy is told."""
    told = []
    chains.chains = SimpleNamespace(stay_begun=told.append)
    new, others = Request(), [Request() for _ in range(8)]
    chains.keep([new], drafted(1), skipped=None)
    batch = SimpleNamespace(reqs=[*others, new])
    chains.complete(batch)  # which would read tensors that this batch has not
    assert told == [[new]] and not chains.begun
    chains.keep([new], drafted(1), skipped=None)
    with pytest.raises(AttributeError):
        chains.complete(SimpleNamespace(reqs=[*others[1:], new]))
