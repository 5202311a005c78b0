"""THE step: verify the drafted chain, keep what the target says, draft the next chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.ops import chain
from sglang_ascend.speculative.forwards import Forwards, Requests, Rows
from sglang_ascend.speculative.lengths import of_rows
from sglang_ascend.speculative.skipped import SkippedRows, slots_of_pages
from sglang_ascend.speculative.skipped.catch_up import catch_up


@dataclass(frozen=True)
class StepResult:
    """One step's outcome."""

    logits: torch.Tensor  # [batch * (K+1), vocab_size], what the rows were sampled from
    sampled: torch.Tensor  # int64 [batch, K+1]; the first accept_lens of a row are emitted
    accept_lens: torch.Tensor  # int32 [batch], in 1..K+1
    new_seq_lens: torch.Tensor  # int64 [batch], committed tokens after the step
    candidates: torch.Tensor  # int64 [batch, K+1], the next step's rows: bonus, then its chain


class Phases(Protocol):
    """The forwards of one step in two parts: launched one by one, or replayed from two graphs.

    What lies between the parts depends on what the batch's requests ask for, and is never captured.
    """

    @property
    def hidden(self) -> torch.Tensor:
        """The target's state of each verified row, [batch * (K+1), hidden_size], until the next
        step begins."""
        ...

    def prepare(self, candidates: torch.Tensor, requests: Requests) -> torch.Tensor:
        """Takes the step's inputs -> positions of the verified rows, int64 [batch * (K+1)], which
        may be read once ``verify`` has returned."""
        ...

    def verify(self) -> torch.Tensor:
        """The target over the K+1 rows of each request -> logits [batch * (K+1), vocab_size]."""
        ...

    def draft(
        self, sampled: torch.Tensor, accept_lens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> torch.Tensor:
        """The MTP layer behind the accepted tokens -> the next candidates, int64 [batch, K+1]."""
        ...


class Sampling(Protocol):
    """How the requests of one batch draw, and what every draw must be told afterwards."""

    # float [batch, K, vocab_size], what the drafts were drawn from; None if none was drawn.
    draft_probs: torch.Tensor | None
    # The operator's own rule in place of ``accept``, for replies that may differ; normally None.
    lossy_rule: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None

    def read_chain(self, candidates: torch.Tensor) -> None:
        """Before the target is launched: whoever needs the chain on the host may begin to copy."""
        ...

    def adjust(self, logits: torch.Tensor, candidates: torch.Tensor) -> None:
        """Each request's penalties, bias and grammar, on every row, in place."""
        ...

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Every row's token as plain decode would draw it, int64 [batch, K+1]."""
        ...

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """What ``draw`` draws from, float [batch, K+1, vocab_size]."""
        ...

    def uniforms(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise that judges K drafts and draws K+1 rows, float64 [batch, K] and [batch, K+1]."""
        ...

    def commit(
        self, candidates: torch.Tensor, sampled: torch.Tensor, accept_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes every rank hold the same tokens and lengths, and counts what is now emitted."""
        ...


def speculative_step(
    candidates: torch.Tensor,
    requests: Requests,
    phases: Phases,
    sampling: Sampling,
    publish: Callable[[torch.Tensor], None],
) -> StepResult:
    """One decode step of every request: 1..K+1 tokens emitted, the next K drafted (FusionSpec).

    ``candidates`` [batch, K+1] is the last emitted token of each request, which is in no cache
    yet, and the chain that was drafted after it. ``publish`` gives the scheduler the new lengths,
    int64 [batch], from which it prepares the next step. Does not synchronise.
    """
    # Prepare, once: target and MTP layer run on the same positions, slots, lengths, block table.
    positions = phases.prepare(candidates, requests)
    sampling.read_chain(candidates)

    # Verify: row j says what follows draft token j.
    logits = phases.verify()

    # Accept the longest prefix of the chain that the target stands by, and one token of its own.
    sampling.adjust(logits, candidates)
    sampled, accept_lens = accept(logits, candidates, positions, sampling)
    sampled, accept_lens = sampling.commit(candidates, sampled, accept_lens)

    # Commit: from here on the scheduler may prepare the next step.
    new_seq_lens = requests.seq_lens + accept_lens
    publish(new_seq_lens)

    # Draft: the MTP layer on what was accepted, then on its own output.
    next_candidates = phases.draft(sampled, accept_lens, new_seq_lens)
    return StepResult(logits, sampled, accept_lens, new_seq_lens, next_candidates)


def accept(
    logits: torch.Tensor, candidates: torch.Tensor, positions: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule that alone makes the step lossless: every emitted token is a draw from the target.

    Row j of ``logits`` is the target's p_j, given draft tokens 1..j. Returns (int64 [batch, K+1],
    of which the first accept_lens of a row are emitted; int32 [batch] in 1..K+1).
    """
    drafts = candidates[:, 1:]
    if sampling.lossy_rule is not None:
        return sampling.lossy_rule(logits, candidates, positions)
    if sampling.draft_probs is None:
        # Draw every row from p_j, as plain decode does. While draft j+1 equals that draw, the next
        # row is what plain decode would have computed; the first that differs is emitted instead.
        drawn = sampling.draw(logits, positions)
        return drawn, chain.verify_chain(drawn, drafts)
    # Drafts drawn from q_j are kept with probability min(1, p/q); the first rejected one is drawn
    # again from norm(max(p_j - q_j, 0)) (Leviathan et al., arXiv 2211.17192).
    return chain.verify_by_rejection(
        sampling.probabilities(logits), sampling.draft_probs, drafts, *sampling.uniforms(positions)
    )


class StepConstants:
    """What no step changes, made once per device and K: index ramps of K verified drafts."""

    def __init__(self, num_steps: int, max_batch_size: int, device: torch.device | str) -> None:
        self.num_steps = num_steps
        self.window = torch.arange(max(1, 2 * num_steps), device=device)
        self.draft_decode = torch.arange(num_steps, device=device)[:, None]
        # Flat number of the row before each request's first: + accept_len is its last kept row.
        width = num_steps + 1
        self.row_before = torch.arange(-1, max_batch_size * width - 1, width, device=device)


class LaunchedPhases:
    """``Phases`` whose forwards are launched one by one; what a graph captures is one of these.

    ``constants`` are those of the K drafts that are verified. As many are drafted, or as many as
    ``num_drafts``, by ``drafting``; ``skipped`` takes the rows behind which none is, and gives them
    back.

    ``propose(logits, positions)`` turns one row of MTP logits per request into draft tokens, int64
    [batch] of the target's vocabulary, which follow the token at ``positions`` - 1.

    ``is_unlikely``, told the probability of each draft, may end the chains earlier. ``at_once``:
    what ``propose`` takes is the likeliest logit, so that nothing need come between two drafts.
    """

    def __init__(
        self,
        forwards: Forwards,
        propose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        constants: StepConstants,
        num_drafts: int | None = None,
        skipped: SkippedRows | None = None,
        is_unlikely: Callable[[torch.Tensor], bool] | None = None,
        drafting: StepConstants | None = None,
        at_once: bool = False,
    ) -> None:
        self.forwards, self.propose, self.constants = forwards, propose, constants
        self.is_unlikely, self.drafting = is_unlikely, drafting or constants
        self.num_drafts = constants.num_steps if num_drafts is None else num_drafts
        self.skipped, self.at_once = skipped, at_once

    def prepare(self, candidates: torch.Tensor, requests: Requests) -> torch.Tensor:
        self.candidates, self.requests = candidates, requests
        inputs = chain.prepare_step(
            requests.seq_lens,
            requests.req_pool_indices,
            requests.req_to_token,
            self.drafting.window,
            requests.max_kv_len,
            requests.page_size,
        )
        width = candidates.shape[1]
        if width <= self.drafting.num_steps:
            inputs = of_rows(inputs, width)
        self.inputs = inputs
        metadata = StepMetadata(inputs.block_table, inputs.kv_lens, inputs.page_size, width)
        self.rows = Rows(inputs.positions, inputs.row_slots, metadata)
        return inputs.positions

    def verify(self) -> torch.Tensor:
        logits, self.hidden = self.forwards.target(
            self.rows, self.candidates.view(-1), self.requests
        )
        return logits

    def draft(
        self, sampled: torch.Tensor, accept_lens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> torch.Tensor:
        # Shift: drop token 0, so that row j pairs the hidden state of token j with token j+1, on
        # the target's own metadata. Rows past the last emitted token hold rejected states; later
        # rows overwrite their slots.
        tokens = sampled.view(-1)
        if self.skipped is not None:
            if self.num_drafts == 0:
                self.skipped.keep(self.rows.slots, self.hidden, tokens)
                is_plain = sampled.shape[1] == 1
                return sampled if is_plain else sampled.gather(1, accept_lens[:, None].long() - 1)
            self._catch_up(self.skipped)
        last_rows = self.constants.row_before[: len(accept_lens)] + accept_lens
        logits, hidden = self.forwards.mtp(self.rows, tokens, self.hidden, last_rows)
        next_candidates = [tokens[last_rows], self.propose(logits, new_seq_lens)]
        likelihood = self._likelihood(logits)
        return self._draft_on(next_candidates, hidden, likelihood, accept_lens, new_seq_lens)

    def complete(self, hidden: torch.Tensor, likelihood: torch.Tensor) -> torch.Tensor:
        """Behind ``prepare`` the rest of chains that a prefill began, candidates [batch, 2] ->
        int64 [batch, K+1]. ``hidden`` [batch, hidden_size] is what the MTP layer gave beside draft
        1, and ``likelihood`` float [batch] that draft's probability.
        """
        begun = list(self.candidates.unbind(dim=1))
        seq_lens = self.requests.seq_lens
        none_accepted = torch.zeros_like(seq_lens, dtype=torch.int32)
        return self._draft_on(begun, hidden, likelihood, none_accepted, seq_lens)

    def _draft_on(
        self,
        candidates: list[torch.Tensor],
        hidden: torch.Tensor,
        likelihood: torch.Tensor | None,
        accept_lens: torch.Tensor,
        new_seq_lens: torch.Tensor,
    ) -> torch.Tensor:
        """The shared MTP layer on its own output, K-1 times more (FastMTP): only lengths change."""
        ahead = chain.place_draft_decode(
            new_seq_lens,
            accept_lens,
            self.inputs.slots,
            self.drafting.draft_decode[: self.num_drafts],
        )
        if self.at_once and self.is_unlikely is None and self.num_drafts > 1:
            drafts = self.forwards.chain(ahead, self.rows.metadata, candidates[-1], hidden)
            if drafts is not None:
                return torch.stack([*candidates, *drafts], dim=1)
        for j in range(self.num_drafts - 1):
            if self.is_unlikely and likelihood is not None and self.is_unlikely(likelihood):
                break
            metadata = replace(self.rows.metadata, kv_lens=ahead.kv_lens[j], query_len=1)
            rows = Rows(ahead.positions[j], ahead.slots[j], metadata)
            logits, hidden = self.forwards.mtp(rows, candidates[-1], hidden)
            candidates.append(self.propose(logits, ahead.kv_lens[j]))
            likelihood = self._likelihood(logits)
        return torch.stack(candidates, dim=1)

    def _likelihood(self, logits: torch.Tensor) -> torch.Tensor | None:
        """float [batch], of the likeliest draft; None where nobody asks."""
        return None if self.is_unlikely is None else logits.softmax(dim=-1).amax(dim=-1)

    def _catch_up(self, skipped: SkippedRows) -> None:
        """The MTP layer on what it skipped of the requests, before it goes on with this step's."""
        if skipped.is_behind:
            table = slots_of_pages(self.inputs.block_table, self.inputs.page_size)
            catch_up(skipped, self.forwards, table, self.requests.seq_lens)
            skipped.is_behind = False
        skipped.forget(self.rows.slots)
