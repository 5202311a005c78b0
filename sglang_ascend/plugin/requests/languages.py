"""Draft heads of several languages: which one drafts each request, and their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.managers.schedule_batch import Req

from sglang_ascend.ops import linear
from sglang_ascend.plugin.quantization.head import QuantizedHead
from sglang_ascend.plugin.requests.pool_state import PoolState
from sglang_ascend.speculative.languages import LanguageTracker, evidence
from sglang_ascend.speculative.vocabulary import DraftVocabulary


class RequestLanguages(PoolState):
    """The language that each running request writes now, and those of the batch that drafts."""

    def __init__(self, vocabulary: DraftVocabulary) -> None:
        self._evidence = evidence(vocabulary)
        # Of the batch: its size, and the rows of each language in it.
        self.batch_size = 0
        self.rows_of: dict[int, torch.Tensor] = {}

    def reserve(self, num_rows: int) -> None:
        """Before any request: the pool has so many rows."""
        self._tracker = LanguageTracker(self._evidence, num_rows, "cpu")

    def restart(self, reqs: list[Req], rows: torch.Tensor) -> None:
        self._tracker.restart(rows, [[*req.origin_input_ids, *req.output_ids] for req in reqs])

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        self._tracker.advance(rows, tokens, num_kept)

    def choose(self, rows: torch.Tensor) -> None:
        """For the chains drafted next, of the requests in ``rows`` of the pool, int [batch]."""
        places = self._tracker.likeliest(rows)
        self.batch_size = len(rows)
        # On the CPU alone, where reading a tensor waits for nothing.
        present = places.unique().tolist()
        self.rows_of = {place: (places == place).nonzero()[:, 0] for place in present}


class LanguageHeads(UnquantizedEmbeddingMethod):
    """Of an MTP layer's head: one product for each language of the batch.

    Its logits are of the target's vocabulary, -inf where a draft cannot be, so that whatever draws
    or compares them needs to know nothing of languages. Text of no listed language gets the whole
    head, which is the target's own.
    """

    def __init__(
        self, languages: RequestLanguages, vocabulary: DraftVocabulary, target_head: Any
    ) -> None:
        self.languages, self.target_head = languages, target_head
        self.lists = [language.token_ids for language in vocabulary.languages]
        self.vocab_size = len(vocabulary.script_of_token)

    def give_whole(self, model: Any) -> None:
        """The model's own weight is the whole head."""

    def give_rows(self, model: Any) -> None:
        self.products = [_product(self.target_head, token_ids) for token_ids in self.lists]
        model.lm_head.quant_method = self

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows_of = self.languages.rows_of
        no_language = len(self.lists)
        if len(x) != self.languages.batch_size or rows_of.keys() == {no_language}:
            return self._whole(x)
        logits = x.new_full((len(x), self.vocab_size), -torch.inf)
        for place, rows in rows_of.items():
            of_rows = x if len(rows_of) == 1 else x[rows]
            if place == no_language:
                logits[rows] = self._whole(of_rows)[:, : self.vocab_size].to(logits.dtype)
            elif len(rows_of) == 1:
                logits.index_copy_(1, self.lists[place], self.products[place](x).to(logits.dtype))
            else:
                product = self.products[place](of_rows).to(logits.dtype)
                logits[rows[:, None], self.lists[place]] = product
        return logits

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
