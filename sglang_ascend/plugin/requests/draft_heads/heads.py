"""An MTP layer's head, of which each request's own tokens are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

from sglang_ascend.ops import linear
from sglang_ascend.plugin.quantization.head import QuantizedHead
from sglang_ascend.plugin.requests.draft_heads.lists import DraftTokens, RequestLists
from sglang_ascend.speculative.vocabulary.file import DraftVocabulary


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
