"""The language that each running request drafts in."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_ascend.plugin.requests.pool_state import PoolState
from sglang_ascend.speculative.vocabulary.file import DraftVocabulary
from sglang_ascend.speculative.vocabulary.languages import LanguageTracker, evidence


class RequestLanguages(PoolState):
    """The language that each running request writes now."""

    def __init__(self, vocabulary: DraftVocabulary) -> None:
        self._evidence = evidence(vocabulary)

    def reserve(self, num_rows: int) -> None:
        """Before any request: the pool has so many rows."""
        self._tracker = LanguageTracker(self._evidence, num_rows, "cpu")

    def restart(self, reqs: list[Req], rows: torch.Tensor) -> None:
        self._tracker.restart(rows, [[*req.origin_input_ids, *req.output_ids] for req in reqs])

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        self._tracker.advance(rows, tokens, num_kept)

    def rows_of(self, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """Of each language in a batch, the places of its requests in ``rows``, int [batch]."""
        places = self._tracker.likeliest(rows)
        # On the CPU alone, where reading a tensor waits for nothing.
        present = places.unique().tolist()
        return {place: (places == place).nonzero()[:, 0] for place in present}
