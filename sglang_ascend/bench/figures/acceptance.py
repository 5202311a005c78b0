"""Accepted drafts, from the histogram that SGLang reports with each reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any


@dataclass(frozen=True)
class Acceptance:
    """``histogram[n]``: verify forwards that accepted n of K drafts, n = 0 .. K."""

    histogram: tuple[int, ...]

    @classmethod
    def of_reply(cls, details: Mapping[str, Any]) -> Acceptance | None:
        """From SGLang's `meta_info` or `spec_tokens_details`; None where nothing was verified."""
        forwards = details.get("spec_verify_ct") or 0
        counts = list(details.get("spec_correct_drafts_histogram") or ())
        if not forwards or not counts:
            return None
        # SGLang's list ends with the most drafts that a forward accepted, which may be below K.
        num_drafts = details["spec_num_proposed_drafts"] // forwards
        return cls(tuple(counts + [0] * (num_drafts + 1 - len(counts))))

    def __add__(self, other: Acceptance) -> Acceptance:
        pairs = zip_longest(self.histogram, other.histogram, fillvalue=0)
        return Acceptance(tuple(a + b for a, b in pairs))

    @property
    def num_drafts(self) -> int:
        return len(self.histogram) - 1

    @property
    def forwards(self) -> int:
        return sum(self.histogram)

    @property
    def length(self) -> float:
        """Tokens of a verify forward: its accepted drafts and one more."""
        return self.length_of_first(self.num_drafts)

    def length_of_first(self, num_drafts: int) -> float:
        """The same if each chain were cut after its first ``num_drafts`` drafts.

        A server with fewer drafts begins its steps at other tokens, so of its own acceptance length
        this is an estimate.
        """
        accepted = sum(min(n, num_drafts) * count for n, count in enumerate(self.histogram))
        return 1 + accepted / self.forwards

    @property
    def per_position(self) -> list[float | None]:
        """Share of draft 1, 2, ... accepted where the draft before it was; None: never there."""
        reached = [sum(self.histogram[n:]) for n in range(len(self.histogram))]
        return [after / before if before else None for before, after in pairwise(reached)]
