"""A replayed step reads its batch's rows and no other's: what a larger batch left is a request
without tokens in row 0, which nobody owns. (What is captured runs in tests/npu_emulation.)"""

import pytest
import torch

from sglang_ascend.speculative.step import Requests

pytestmark = pytest.mark.sglang


def requests_of(lengths: list[int]) -> Requests:
    count = len(lengths)
    return Requests(
        seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(1, count + 1, dtype=torch.int32),
        req_to_token=torch.zeros(9, 40, dtype=torch.int32),
        max_kv_len=40,
    )


@pytest.fixture
def buffers():
    from sglang_ascend.plugin.step_graphs import StepBuffers

    return StepBuffers(max_batch_size=8, width=4, vocab_size=10, device="cpu")


def fill(buffers, lengths: list[int]) -> tuple[torch.Tensor, Requests]:
    candidates = torch.randint(10, (len(lengths), 4))
    requests = requests_of(lengths)
    buffers.fill(candidates, requests)
    return candidates, requests


@pytest.mark.parametrize("sizes", [(8, 3), (3, 8, 1), (5, 5), (2, 4, 3, 1)])
def test_rows_of_no_request_are_row_0_without_tokens(buffers, sizes):
    for size in sizes:
        candidates, requests = fill(buffers, [10 + i for i in range(size)])
        assert torch.equal(buffers.candidates[:size], candidates)
        assert torch.equal(buffers.seq_lens[:size], requests.seq_lens)
        assert buffers.req_pool_indices[:size].tolist() == list(range(1, size + 1))
        assert not buffers.seq_lens[size:].any() and not buffers.req_pool_indices[size:].any()


def test_rows_that_were_left_would_be_seen(buffers):
    """The control: a batch that does not say how many rows were filled before it."""
    fill(buffers, [10] * 8)
    buffers._num_filled = 0
    fill(buffers, [10] * 3)
    assert buffers.req_pool_indices[3:].any()


def test_a_batch_is_replayed_on_the_smallest_graph_that_holds_it():
    from sglang_ascend.plugin.step_graphs import StepGraphs

    graphs = object.__new__(StepGraphs)
    graphs.batch_sizes = [1, 2, 4]
    graphs.graphs = {size: f"graph of {size}" for size in graphs.batch_sizes}
    found = [graphs.graph_for(size) for size in (1, 2, 3, 4, 5)]
    assert found == ["graph of 1", "graph of 2", "graph of 4", "graph of 4", None]
