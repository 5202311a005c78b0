"""Which tokens the drafts of each running request can be: a list, and the request's own text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ascend.plugin.requests.draft_heads.languages import RequestLanguages
from sglang_ascend.speculative.vocabulary.context import ContextTracker
from sglang_ascend.speculative.vocabulary.file import DraftVocabulary


@dataclass(frozen=True)
class DraftTokens:
    """Of the requests of one batch."""

    batch_size: int
    # The list of each row; the number of lists stands for no list, and the whole vocabulary.
    rows_of: dict[int, torch.Tensor]
    # Tokens beside the list, int64 [n] each: whose they are, by place in the batch, and which.
    places: torch.Tensor
    context: torch.Tensor


class RequestLists:
    """What is tracked of requests, and what it says of the batch that drafts."""

    def __init__(self, vocabulary: DraftVocabulary, vocab_size: int) -> None:
        self.languages = RequestLanguages(vocabulary) if vocabulary.languages else None
        self._listed, self._vocab_size = vocabulary.listed_by_all, vocab_size
        nobody = torch.zeros(0, dtype=torch.int64)
        self.batch = DraftTokens(0, {}, nobody, nobody)

    def reserve(self, num_rows: int) -> None:
        """Before any request: the pool has so many rows."""
        self._context = ContextTracker(self._listed, self._vocab_size, num_rows, "cpu")
        if self.languages is not None:
            self.languages.reserve(num_rows)

    def before_prefill(self, batch: ScheduleBatch) -> None:
        # Once lengths are published the batch is the scheduler's again.
        self._rows = rows = batch.req_pool_indices.clone()
        # Rows of a mixed chunk bring their last emitted token, which is known already.
        num_prompts = len(batch.reqs) - len(batch.decoding_reqs or ())
        for req, row in zip(batch.reqs[:num_prompts], rows[:num_prompts].tolist(), strict=True):
            self._context.restart(row, [*req.origin_input_ids, *req.output_ids])
        if self.languages is not None:
            self.languages.prefill(batch)

    def begin_replies(self, first_tokens: torch.Tensor) -> None:
        """What a prefill emits, int [batch]. Of a prompt that goes on it means nothing, and is
        forgotten when that does."""
        emitted = torch.ones_like(self._rows)
        self._context.extend(self._rows, first_tokens.long()[:, None], emitted)
        self._choose(self._rows)

    def advance(
        self,
        rows: torch.Tensor,
        candidates: torch.Tensor,
        sampled: torch.Tensor,
        num_kept: torch.Tensor,
    ) -> None:
        """A step's outcome; the chains drafted next are of these requests."""
        self._context.extend(rows, sampled, num_kept)
        if self.languages is not None:
            self.languages.advance(rows, candidates, num_kept)
        self._choose(rows)

    def _choose(self, rows: torch.Tensor) -> None:
        if self.languages is None:
            rows_of = {0: torch.arange(len(rows))}
        else:
            rows_of = self.languages.rows_of(rows)
        self.batch = DraftTokens(len(rows), rows_of, *self._context.of(rows))
