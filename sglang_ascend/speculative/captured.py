"""The step on a device that replays graphs: both phases captured once for each batch size, and for
each K that a step may have."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_ascend.ops import chain, sampling
from sglang_ascend.speculative.forwards import Requests
from sglang_ascend.speculative.step import LaunchedPhases, Phases, StepConstants

# Runs before a capture, so that nothing is compiled, loaded or planned within it.
NUM_WARM_UPS = 2
# More than half the cores of any NPU: attention of so many requests has no splits.
MANY_REQUESTS = 32


class Graph(Protocol):
    """What a device recorded of one phase."""

    def replay(self) -> None:
        """Launches it again, on what its inputs hold now, into the tensors it has returned."""
        ...


# Records what a function launches -> (the graph, the function's result).
Capture = Callable[[Callable[[], Any]], tuple[Graph, Any]]


class StepBuffers:
    """What every captured step reads, at addresses that stay: rows of the largest batch.

    Rows of no request are a request without tokens in row 0 of the slot table, which no request
    owns: they write to slot 0.
    """

    def __init__(self, max_batch_size: int, width: int, device: torch.device | str) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.candidates = zeros(max_batch_size, width)
        self.seq_lens = zeros(max_batch_size)
        self.req_pool_indices = zeros(max_batch_size)
        self.sampled = zeros(max_batch_size, width)
        self.accept_lens = torch.ones(max_batch_size, dtype=torch.int32, device=device)
        self._num_filled = 0

    def fill(self, candidates: torch.Tensor, requests: Requests) -> None:
        batch_size = len(candidates)
        self.candidates[:batch_size].copy_(candidates)
        self.seq_lens[:batch_size].copy_(requests.seq_lens)
        self.req_pool_indices[:batch_size].copy_(requests.req_pool_indices)
        if batch_size < self._num_filled:
            self.seq_lens[batch_size : self._num_filled].zero_()
            self.req_pool_indices[batch_size : self._num_filled].zero_()
        self._num_filled = batch_size

    @property
    def num_rows(self) -> int:
        """Verified rows of the batch that was filled in last."""
        return self._num_filled * self.candidates.shape[1]

    def requests(self, batch_size: int, req_to_token: torch.Tensor, page_size: int) -> Requests:
        """The first rows as requests, of any length that the slot table holds."""
        return Requests(
            self.seq_lens[:batch_size],
            self.req_pool_indices[:batch_size],
            req_to_token,
            max_kv_len=req_to_token.shape[1],
            page_size=page_size,
        )


@dataclass(frozen=True)
class CapturedPhases:
    """``step.Phases`` of a batch on the graphs of its size, or of the next larger one."""

    buffers: StepBuffers
    verify_graph: Graph
    draft_graph: Graph
    # What the graphs leave, in the rows of their own batch size.
    positions: torch.Tensor
    logits: torch.Tensor
    states: torch.Tensor
    next_candidates: torch.Tensor
    # What a prefill may have left otherwise, and no graph sets; launches nothing behind a step.
    ready_replay: Callable[[], None]

    def prepare(self, candidates: torch.Tensor, requests: Requests) -> torch.Tensor:
        self.ready_replay()
        self.buffers.fill(candidates, requests)
        return self.positions[: candidates.numel()]

    def verify(self) -> torch.Tensor:
        self.verify_graph.replay()
        return self.logits[: self.buffers.num_rows]

    @property
    def hidden(self) -> torch.Tensor:
        return self.states[: self.buffers.num_rows]

    def draft(
        self, sampled: torch.Tensor, accept_lens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> torch.Tensor:
        batch_size = len(sampled)
        self.buffers.sampled[:batch_size].copy_(sampled)
        self.buffers.accept_lens[:batch_size].copy_(accept_lens)
        self.draft_graph.replay()
        # Read by the relay, or by the next step, before any step is replayed again.
        return self.next_candidates[:batch_size]


def capture_phases(
    phases: LaunchedPhases,
    buffers: StepBuffers,
    requests: Requests,
    capture: Capture,
    synchronize: Callable[[], None],
    ready_replay: Callable[[], None] = lambda: None,
) -> CapturedPhases:
    """Records ``phases`` on the first rows of ``buffers``, as many as ``requests`` has."""
    batch_size = len(requests.seq_lens)
    candidates = buffers.candidates[:batch_size]
    sampled, accept_lens = buffers.sampled[:batch_size], buffers.accept_lens[:batch_size]

    def verify() -> tuple[torch.Tensor, ...]:
        return phases.prepare(candidates, requests), phases.verify(), phases.hidden

    def draft() -> torch.Tensor:
        return phases.draft(sampled, accept_lens, requests.seq_lens + accept_lens)

    for _ in range(NUM_WARM_UPS):
        verify()
        draft()
    synchronize()
    verify_graph, (positions, logits, hidden) = capture(verify)
    draft_graph, next_candidates = capture(draft)
    return CapturedPhases(
        buffers, verify_graph, draft_graph, positions, logits, hidden, next_candidates, ready_replay
    )


class CapturedSteps:
    """The captured phases by K and batch size; every K has the same sizes."""

    def __init__(self, of: dict[int, dict[int, CapturedPhases]]) -> None:
        self.of = of
        self.sizes: Sequence[int] = sorted(next(iter(of.values())))

    def that_holds(self, batch_size: int, num_drafts: int) -> CapturedPhases | None:
        """The smallest with so many requests, None if even the largest has fewer."""
        place = bisect.bisect_left(self.sizes, batch_size)
        return self.of[num_drafts][self.sizes[place]] if place < len(self.sizes) else None


def warm_up(
    phases: Phases,
    constants: StepConstants,
    req_to_token: torch.Tensor,
    page_size: int,
    vocab_size: int,
    multiple: int = 1,
) -> None:
    """Compiles what a step launches outside its graphs: the steps that follow launch no more.

    Kernels depend on these sizes and on no number of requests, pages or splits, but that attention
    has one with splits and one without (``tests/ops/test_compiled_once.py``). One request whose
    table is the longest, req_to_token's int32 [requests, context length], has most splits, and
    many of a page have fewest. As a graph's padding they are without tokens and write to slot 0.
    ``multiple``: of what every batch is padded to. Synchronises.
    """
    device, width = req_to_token.device, constants.num_steps + 1
    shortest = max(page_size, 2 * width)  # of their own they write 2K positions
    many = min(MANY_REQUESTS, len(req_to_token) - 1)  # row 0 is no request's
    for num_requests, max_kv_len in ((1, req_to_token.shape[1]), (many, shortest)):
        batch_size = -(-num_requests // multiple) * multiple
        nothing = torch.zeros(batch_size, dtype=torch.int64, device=device)
        tokens = torch.zeros(batch_size, width, dtype=torch.int64, device=device)
        phases.prepare(tokens, Requests(nothing, nothing, req_to_token, max_kv_len, page_size))
        phases.verify()
        accept_lens = chain.verify_chain(tokens, tokens[:, 1:])
        phases.draft(tokens, accept_lens, nothing + accept_lens)
    ones = torch.ones(width, device=device)
    logits = torch.zeros(width, vocab_size, device=device)
    top_ks = torch.full_like(ones, vocab_size, dtype=torch.int32)
    sampling.filter_probs(logits, ones[:, None], top_ks, ones, torch.zeros_like(ones))
    torch.get_device_module(device).synchronize()
