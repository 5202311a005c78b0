"""Which share of the drafts at each position is accepted: a log line, and counts to be told.

Fed with host integers that the scheduler has anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

logger = logging.getLogger(__name__)


def accepted_by_position(accepted: Sequence[int], num_drafts: int) -> list[int]:
    """``accepted`` are drafts of one step each, 0 to K -> in how many draft k was, for k = 1..K.

    A chain is kept up to its first wrong draft: k was accepted where at least k were.
    """
    exactly = [accepted.count(k) for k in range(num_drafts, 0, -1)]
    return list(accumulate(exactly))[::-1]


class AcceptanceCounts:
    """One log line for every ``log_interval`` batches, as often as SGLang logs its own.

    ``on_step(drafted, accepted)`` is told every batch that had any: its drafts by position, and
    those accepted.
    """

    def __init__(
        self,
        num_drafts: int,
        log_interval: int,
        on_step: Callable[[Sequence[int], Sequence[int]], None] = lambda drafted, accepted: None,
        what: str = "Drafts accepted by position",
    ) -> None:
        self._num_drafts, self._log_interval = num_drafts, log_interval
        self._on_step, self._what = on_step, what
        self._begin()

    def _begin(self) -> None:
        self._num_batches = 0
        self._drafted, self._accepted = [0] * self._num_drafts, [0] * self._num_drafts

    def record(self, accepted: Sequence[int], num_drafts: int | None = None) -> None:
        """One step of a batch: the drafts accepted of each request, 0 to K; ``num_drafts`` where
        the step had another K."""
        if len(accepted) == 0:
            return
        in_step = self._num_drafts if num_drafts is None else num_drafts
        if in_step > 0:
            self._add(accepted, in_step)
        self._num_batches += 1
        if self._num_batches == self._log_interval:
            logger.info("%s: %s.", self._what, ", ".join(self._shares()))
            self._begin()

    def _add(self, accepted: Sequence[int], in_step: int) -> None:
        drafted = [len(accepted) if k < in_step else 0 for k in range(self._num_drafts)]
        # A chain that was verified beyond its drafts may be right there too, as none of them.
        of_drafts = [min(count, in_step, self._num_drafts) for count in accepted]
        found = accepted_by_position(of_drafts, self._num_drafts)
        self._on_step(drafted, found)
        for totals, new in ((self._drafted, drafted), (self._accepted, found)):
            totals[:] = [total + count for total, count in zip(totals, new, strict=True)]

    def _shares(self) -> Iterator[str]:
        for drafted, accepted in zip(self._drafted, self._accepted, strict=True):
            yield f"{accepted / drafted:.2f} of {drafted}" if drafted else "none"
