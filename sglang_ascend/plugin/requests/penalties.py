"""Penalties of SGLang's requests, exact on every verified row."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_ascend.plugin.requests.pool_state import PoolState
from sglang_ascend.sampling.penalties import OutputCounts, Penalties, Terms, terms_of


def asks_penalties(batch: ScheduleBatch) -> bool:
    """Whether some request asks for a penalty: SGLang makes these sums for such a batch alone."""
    return batch.sampling_info.acc_additive_penalties is not None


class RequestPenalties(PoolState):
    """Counts what penalised requests emit, and says what that does to their next logits.

    Callers ask it about batches of which ``asks_penalties`` is true, and about no others. SGLang's
    penalizers count one token a step, the last that the host knows of; here a step emits up to K+1
    and the host learns of them a step late.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self._pool = (num_rows, vocab_size, device)
        self._counts: OutputCounts | None = None
        self._of_last_batch: tuple[list[tuple[Req, int]], Penalties, torch.Tensor] | None = None
        # How often each request had been retracted when its counts began.
        self._counted: WeakKeyDictionary[Req, int] = WeakKeyDictionary()

    def prefill(self, batch: ScheduleBatch) -> None:
        """Before the forward of prompts: their requests' counts start, and the terms that SGLang's
        sampler will apply to the first token are exact (after a retraction it is not the first).
        """
        super().prefill(batch)
        penalties, prompt_lens = self._of(batch)
        counts = self._counts.of(batch.req_pool_indices)[:, None]
        terms = terms_of(penalties, counts, (batch.seq_lens - prompt_lens)[:, None])
        batch.sampling_info.acc_additive_penalties = terms.additive[:, 0]
        batch.sampling_info.acc_scaling_penalties = terms.scale[:, 0]

    def decode(self, batch: ScheduleBatch) -> None:
        """Before the forward of a plain decode step: a chain of the last token alone."""
        last_tokens = batch.input_ids[:, None]
        # The slot of the last token is already counted in, unlike in a speculative step.
        terms = self._terms(batch, last_tokens, num_committed=batch.seq_lens - 1)
        batch.sampling_info.acc_additive_penalties = terms.additive[:, 0]
        batch.sampling_info.acc_scaling_penalties = terms.scale[:, 0]
        self.commit(batch, last_tokens, torch.ones_like(batch.req_pool_indices))

    def along_chain(self, batch: ScheduleBatch, candidates: torch.Tensor) -> Terms:
        """The terms of rows that verify ``candidates`` [batch, K+1]: [batch, K+1, vocab_size]."""
        return self._terms(batch, candidates, num_committed=batch.seq_lens)

    def commit(
        self, batch: ScheduleBatch, candidates: torch.Tensor, accept_lens: torch.Tensor
    ) -> None:
        """After acceptance: the verified rows that were kept are emitted tokens."""
        self.advance(batch.req_pool_indices, candidates, accept_lens)

    def restart(self, reqs: list[Req], rows: torch.Tensor) -> None:
        self._restart(reqs, rows, [list(req.output_ids) for req in reqs])

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        self._counts.add(rows, tokens, num_kept)

    def _terms(
        self, batch: ScheduleBatch, candidates: torch.Tensor, num_committed: torch.Tensor
    ) -> Terms:
        """``num_committed`` int64 [batch]: tokens before the first candidate, prompt included."""
        penalties, prompt_lens = self._of(batch)
        ramp = torch.arange(1, candidates.shape[1] + 1, device=candidates.device)
        num_output_tokens = (num_committed - prompt_lens)[:, None] + ramp
        counts = self._counts.along(batch.req_pool_indices, candidates)
        return terms_of(penalties, counts, num_output_tokens)

    def _restart(self, reqs: list[Req], rows: torch.Tensor, outputs: list[list[int]]) -> None:
        if self._counts is None:
            self._counts = OutputCounts(*self._pool)
        if reqs:
            self._counts.restart(rows, outputs)
            self._counted.update({req: req.retraction_count for req in reqs})

    def _count_received(self, batch: ScheduleBatch) -> None:
        """Requests that another server prefilled begin here, with the first token behind them; so
        do those that were retracted and came back without a prefill."""
        begun = [self._counted.get(req) == req.retraction_count for req in batch.reqs]
        new = [i for i, has_begun in enumerate(begun) if not has_begun]
        outputs = [list(batch.reqs[i].output_ids)[:-1] for i in new]
        self._restart([batch.reqs[i] for i in new], batch.req_pool_indices[new], outputs)

    def _of(self, batch: ScheduleBatch) -> tuple[Penalties, torch.Tensor]:
        """The batch's penalties and prompt lengths, made again only when it changes."""
        requests = [(req, req.retraction_count) for req in batch.reqs]
        if self._of_last_batch is None or self._of_last_batch[0] != requests:
            self._count_received(batch)
            _, vocab_size, device = self._pool
            self._of_last_batch = (requests, *_penalties_of(batch.reqs, vocab_size, device))
        return self._of_last_batch[1:]


def _penalties_of(
    reqs: list[Req], vocab_size: int, device: torch.device | str
) -> tuple[Penalties, torch.Tensor]:
    def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    params = [req.sampling_params for req in reqs]
    stop_tokens = torch.zeros(len(reqs), vocab_size, dtype=torch.bool)
    for row, req in enumerate(reqs):
        if req.sampling_params.min_new_tokens > 0:
            stop_tokens[row, sorted(ending_tokens(req))] = True
    penalties = Penalties(
        frequency=column([p.frequency_penalty for p in params], torch.float32),
        presence=column([p.presence_penalty for p in params], torch.float32),
        repetition=column([p.repetition_penalty for p in params], torch.float32),
        min_new_tokens=column([p.min_new_tokens for p in params], torch.int64),
        stop_tokens=stop_tokens.to(device, non_blocking=True),
    )
    return penalties, column([len(req.origin_input_ids) for req in reqs], torch.int64)


def ending_tokens(req: Req) -> set[int]:
    """Whatever ends the request: its own ids, the model's and the tokenizer's."""
    tokens = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    tokenizer = req.tokenizer
    if tokenizer is not None:
        tokens |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return tokens - {None}
