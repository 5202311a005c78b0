"""Which tokens the drafts of each running request can be, a list's and those of its own text, and
the MTP layer's head of these tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ascend.ops import chain, linear
from sglang_ascend.plugin.quantization.head import QuantizedHead
from sglang_ascend.plugin.requests.draft_heads.languages import RequestLanguages
from sglang_ascend.plugin.requests.pool_state import prompts_of
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
        self._rows = batch.req_pool_indices.clone()
        # What the rows of a mixed chunk bring, their last emitted token, is known already.
        reqs, rows = prompts_of(batch)
        for req, row in zip(reqs, rows.tolist(), strict=True):
            self._context.restart(row, [*req.origin_input_ids, *req.output_ids])
        if self.languages is not None:
            self.languages.prefill(batch)

    def begin_replies(self, first_tokens: torch.Tensor) -> None:
        """What a prefill emits, int [batch]. Of a prompt that goes on it means nothing, and is
        forgotten when that does."""
        self._choose(self._rows, first_tokens.long()[:, None], torch.ones_like(self._rows))

    def draft_for(self, rows: torch.Tensor) -> None:
        """The chains drafted next are of these requests, which have emitted nothing since."""
        self._choose(rows, torch.zeros_like(rows)[:, None].long(), torch.zeros_like(rows))

    def advance(
        self,
        rows: torch.Tensor,
        candidates: torch.Tensor,
        sampled: torch.Tensor,
        num_kept: torch.Tensor,
    ) -> None:
        """A step's outcome; the chains drafted next are of these requests."""
        if self.languages is not None:
            self.languages.advance(rows, candidates, num_kept)
        self._choose(rows, sampled, num_kept)

    def _choose(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        """Of ``tokens`` the first ``num_kept`` were emitted."""
        known = self._context
        own = chain.extend_context(
            known.ring, known.num_written, known.is_unlisted, rows, tokens, num_kept
        )
        if self.languages is None:
            rows_of = {0: torch.arange(len(rows))}
        else:
            rows_of = self.languages.rows_of(rows)
        self.batch = DraftTokens(len(rows), rows_of, *own)


class ListedHeads(UnquantizedEmbeddingMethod):
    """One product for each list of the batch, and one row of the head for each token of a
    request's text that its list lacks.

    Its logits are of the target's vocabulary, -inf where a draft cannot be, so that whatever draws
    or compares them needs to know nothing of lists. Text of no listed language gets the whole
    head, which is the target's own.
    """

    def __init__(
        self, lists: RequestLists, vocabulary: DraftVocabulary, vocab_size: int, target_head: Any
    ) -> None:
        self.lists, self.target_head, self.vocab_size = lists, target_head, vocab_size
        self.token_ids = vocabulary.lists
        self._context: tuple[DraftTokens, torch.Tensor] | None = None

    def give_whole(self, model: Any) -> None:
        """The model's own weight is the whole head."""

    def give_rows(self, model: Any) -> None:
        self.products = [_product(self.target_head, token_ids) for token_ids in self.token_ids]
        self._context = None
        model.lm_head.quant_method = self

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        batch, no_list = self.lists.batch, len(self.token_ids)
        if len(x) != batch.batch_size or batch.rows_of.keys() == {no_list}:
            return self._whole(x)
        logits = x.new_full((len(x), self.vocab_size), -torch.inf, dtype=torch.float32)
        for place, rows in batch.rows_of.items():
            is_only = len(batch.rows_of) == 1
            of_rows = x if is_only else x[rows]
            if place == no_list:
                logits[rows] = self._whole(of_rows)[:, : self.vocab_size].float()
            elif is_only:
                logits.index_copy_(1, self.token_ids[place], self.products[place](x).float())
            else:
                product = self.products[place](of_rows).float()
                logits[rows[:, None], self.token_ids[place]] = product
        if len(batch.context):
            logits[batch.places, batch.context] = self._of_context(batch, x)
        return logits

    def _of_context(self, batch: DraftTokens, x: torch.Tensor) -> torch.Tensor:
        """float32 [n], in the precision of the products."""
        if self._context is None or self._context[0] is not batch:
            # All drafts of a chain have the same.
            self._context = batch, _rows(self.target_head, batch.context)
        products = (x[batch.places].float() * self._context[1]).sum(dim=1)
        return products.to(x.dtype).float()

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return self.target_head.quant_method.apply(self.target_head, x, None)


def _product(head: Any, token_ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """x -> logits of these tokens, of a copy of their rows."""
    method = head.quant_method
    if isinstance(method, QuantizedHead):
        cut = method.cut(token_ids)
        return lambda x: cut.apply(head, x)
    prepared = linear.prepare(head.weight.data[token_ids])
    return lambda x: linear.linear(x.to(prepared.dense.dtype), prepared)


def _rows(head: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [n, hidden_size]"""
    method = head.quant_method
    if isinstance(method, QuantizedHead):
        return method.rows(token_ids)
    return head.weight.data[token_ids].float()
