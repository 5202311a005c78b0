"""Drafts by prompt lookup beside those of the MTP layer: which of the two a request verifies next.

Both are judged by how often the next draft is right where all before it were: a lookup by the
equal tokens that it was found by, whether it was verified or not, and the MTP layer where it
drafted. n drafts of which each is right with probability a keep a + a^2 + ... + a^n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ascend.ops import chain
from sglang_ascend.speculative.lengths import lengthened
from sglang_ascend.speculative.lookup.choice import Choice, Cost, choose_chains, none_chosen

# Equal tokens that a lookup is found by.
MIN_MATCH, MAX_MATCH = 2, 5
# Judged drafts after which an older one counts half: of one request, and of the server.
HALF_LIFE, SERVER_HALF_LIFE = 24.0, 2000.0
# The server's rate is what a request begins with, as if so many of its drafts had been judged; the
# server's own begins with PRIOR_RATE.
PRIOR_DRAFTS, PRIOR_RATE = 4.0, 0.5
STEPS_OF_USUAL = 8  # of which what is usual is the average
MTP = 0  # the place of the MTP layer's counts; that of a lookup is the tokens it was found by
HIGHEST_RATE = 0.98


@dataclass(frozen=True)
class Proposal:
    """What the lookup drafts behind the last emitted token of each request."""

    drafts: torch.Tensor  # int64 [batch, most drafts]
    choice: Choice  # where they are taken in place of what the MTP layer drafts

    @property
    def is_chosen(self) -> torch.Tensor:
        return self.choice.is_chosen

    def instead_of(self, drafted: torch.Tensor) -> torch.Tensor:
        """int64 [batch, drafts + 1]: ``drafted`` [batch, drafts + 1] but where the lookup's are
        chosen."""
        width = max(self.choice.num_drafts + 1, drafted.shape[1])
        chains = lengthened(drafted, width).clone()
        chains[:, 1:] = torch.where(
            self.is_chosen[:, None], self.drafts[:, : width - 1], chains[:, 1:]
        )
        return chains


class LookupDrafts:
    """Of each row of the request pool: its tokens, what was drafted last, and what was right.

    All of it goes by tokens, so that every rank chooses the same. It lies on the CPU, where
    reading a tensor waits for nothing.
    """

    def __init__(self, num_rows: int, max_len: int, most_drafts: int) -> None:
        self.most_drafts = most_drafts
        # Behind the last token a step writes what it sampled and did not accept.
        self.tokens = torch.zeros(num_rows, max_len + most_drafts + 2, dtype=torch.int32)
        self._lens = torch.zeros(num_rows, dtype=torch.int64)
        self._ramp = torch.arange(most_drafts + 2)
        # What was looked up last, and by how many equal tokens; none: 0.
        self._drafts = torch.zeros(num_rows, most_drafts, dtype=torch.int64)
        self._matched = torch.zeros(num_rows, dtype=torch.int64)
        # Of the chain that is verified next: whether it was looked up, and how many it drafts.
        self.is_lookup = torch.zeros(num_rows, dtype=torch.bool)
        self.lengths = torch.ones(num_rows, dtype=torch.int64)
        self.kept = 0.0  # of the chains that were looked up last, on average, as was expected
        # Drafts of the MTP layer in a step, on average: chains that end early have fewer than K.
        self.usual_drafts = float(most_drafts)
        self.num_drafted = 0  # by the MTP layer, in the last step
        # [..., 0] were right of [..., 1] judged; of each request, and of all.
        self._counts = torch.zeros(num_rows, MAX_MATCH + 1, 2)
        self._server = torch.zeros(MAX_MATCH + 1, 2)
        self._server[:] = torch.tensor([PRIOR_RATE, 1.0]) * PRIOR_DRAFTS

    def restart(self, row: int, known: Sequence[int]) -> None:
        """A request begins in this row of the pool, with the tokens that it has."""
        self.tokens[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self._lens[row] = len(known)
        self._counts[row] = 0.0

    def extend(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """One more token of each request."""
        self.tokens[rows, self._lens[rows]] = tokens.int()
        self._lens[rows] += 1

    def begin_chains(self, rows: torch.Tensor, num_drafts: int = 1) -> None:
        """A prefill drafts one token, by the MTP layer, or none."""
        self.is_lookup[rows], self.lengths[rows], self._matched[rows] = False, num_drafts, 0

    def accept(
        self,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        sampled: torch.Tensor,
        accept_lens: torch.Tensor,
    ) -> None:
        """A step's outcome: the first ``accept_lens`` of ``sampled`` follow ``last_tokens``."""
        emitted = torch.cat([last_tokens[:, None], sampled], dim=1).int()
        places = self._lens[rows][:, None] + self._ramp[: emitted.shape[1]]
        self.tokens[rows[:, None], places] = emitted
        # The last one that was emitted is in no cache yet, as ``last_tokens`` were.
        self._lens[rows] += accept_lens
        self._judge(rows, sampled, accept_lens.long())

    def _judge(self, rows: torch.Tensor, sampled: torch.Tensor, accept_lens: torch.Tensor) -> None:
        looked_up, matched = self._drafts[rows], self._matched[rows]
        width = sampled.shape[1] - 1
        agreed = chain.verify_chain(sampled, looked_up[:, :width])
        # Of a draft behind the emitted tokens nothing is known.
        self._count(rows, matched, (agreed - 1).long(), accept_lens.clamp_max(width), matched > 0)
        of_mtp = torch.full_like(matched, MTP)
        lengths = self.lengths[rows]
        is_mtp = ~self.is_lookup[rows]
        self._count(rows, of_mtp, (accept_lens - 1).minimum(lengths), lengths, is_mtp)

    def _count(
        self,
        rows: torch.Tensor,
        places: torch.Tensor,
        num_right: torch.Tensor,
        num_known: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """A draft is judged where all before it were right."""
        if not bool(counts.any()):
            return
        num_right = num_right.minimum(num_known)
        judged = num_right + (num_right < num_known)
        new = torch.stack([num_right, judged], dim=1) * counts[:, None]
        faded = 0.5 ** (new[:, 1:] / HALF_LIFE)
        self._counts[rows, places] = self._counts[rows, places] * faded + new
        self._server *= 0.5 ** (new[:, 1].sum() / SERVER_HALF_LIFE)
        self._server.index_add_(0, places, new.float())

    def propose(self, rows: torch.Tensor, num_mtp_drafts: int, cost: Cost) -> Proposal:
        """Behind the last token that was emitted, beside chains of the MTP layer."""
        drafts, matched = chain.look_up(
            self.tokens, rows, self._lens[rows] + 1, self.most_drafts, MIN_MATCH, MAX_MATCH
        )
        self._drafts[rows], self._matched[rows] = drafts, matched
        if bool((matched > 0).any()):
            choice = self._choose(rows, matched, num_mtp_drafts, cost)
        else:
            choice = none_chosen(len(rows))
        self.kept = choice.kept
        self.is_lookup[rows] = choice.is_chosen
        self.lengths[rows] = choice.num_drafts
        return Proposal(drafts, choice)

    def _choose(
        self, rows: torch.Tensor, matched: torch.Tensor, num_mtp_drafts: int, cost: Cost
    ) -> Choice:
        ramp = self._ramp[1 : self.most_drafts + 1]
        kept = self._rates(rows, matched)[:, None] ** ramp * (matched > 0)[:, None]
        of_mtp = self._rates(rows, torch.full_like(matched, MTP))[:, None]
        kept_of_mtp = (of_mtp ** ramp[:num_mtp_drafts]).sum(dim=1)
        return choose_chains(kept.cumsum(dim=1), kept_of_mtp, num_mtp_drafts, cost)

    def were_drafted(self, rows: torch.Tensor, num_drafts: int) -> None:
        """By the MTP layer, which may be fewer or more than were expected; chains that are looked
        up are as long as its are."""
        self.num_drafted = num_drafts
        lengths = self.lengths[rows].clamp_min(num_drafts)
        self.lengths[rows] = torch.where(self.is_lookup[rows], lengths, num_drafts)
        if num_drafts > 0:
            self.usual_drafts += (num_drafts - self.usual_drafts) / STEPS_OF_USUAL

    def _rates(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        right, judged = self._counts[rows, places].unbind(-1)
        of_all = self._server[places]
        of_server = of_all[:, 0] / of_all[:, 1]
        rate = (right + PRIOR_DRAFTS * of_server) / (judged + PRIOR_DRAFTS)
        return rate.clamp_max(HIGHEST_RATE)
