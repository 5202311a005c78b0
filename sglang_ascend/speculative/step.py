"""THE step: draft a chain, verify it with the target, keep what the target would have said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_ascend.ops import chain


@dataclass(frozen=True)
class DraftSeed:
    """What one step leaves for the next: the MTP layer's state at the last accepted token."""

    bonus_tokens: torch.Tensor  # int [batch], last accepted token, not yet in the target's cache
    first_tokens: torch.Tensor  # int64 [batch], draft token 1, already drawn from the MTP layer
    hidden_states: torch.Tensor  # [batch, hidden], MTP output that draft token 1 came from


@dataclass(frozen=True)
class StepResult:
    """One step's outcome; row-major tensors have num_draft_tokens rows per request."""

    sampled: torch.Tensor  # int [batch, num_draft_tokens]; the first accept_lens are emitted
    accept_lens: torch.Tensor  # int32 [batch], in 1..num_draft_tokens
    accept_index: torch.Tensor  # int32 [batch, num_draft_tokens], -1 past accept_lens
    new_seq_lens: torch.Tensor  # int [batch], committed tokens after the step
    seed: DraftSeed


class Forwards(Protocol):
    """The models as the step sees them. Each call runs one forward and writes its KV slots.

    Draft tokens are ids of the target's vocabulary, whatever the draft head covers.
    """

    def draft(
        self, step: int, tokens: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MTP, one row per request at position seq_len + step -> (next draft token, hidden)."""
        ...

    def verify(self, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Target over [batch, K+1] rows from position seq_len -> (logits, hidden) per row."""
        ...

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """One draw per row from the request's sampling parameters -> int [batch, K+1]."""
        ...

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        """Tells the scheduler the committed lengths, so that it prepares the next step."""
        ...

    def extend(
        self, tokens: torch.Tensor, hidden: torch.Tensor, last_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MTP over the verified rows with the target's hidden states -> (next draft token,
        hidden) of ``last_rows``, flat row numbers, one per request."""
        ...


def draft_chain(seed: DraftSeed, num_steps: int, forwards: Forwards) -> torch.Tensor:
    """int64 [batch, num_steps]: the shared MTP layer applied to its own output (FastMTP)."""
    tokens, hidden = seed.first_tokens, seed.hidden_states
    drafted = [tokens]
    for step in range(num_steps - 1):
        tokens, hidden = forwards.draft(step, tokens, hidden)
        drafted.append(tokens)
    return torch.stack(drafted, dim=1)


def speculative_step(
    seed: DraftSeed, seq_lens: torch.Tensor, num_steps: int, forwards: Forwards
) -> StepResult:
    """One decode step of every request: K drafted tokens, 1..K+1 emitted ones.

    The order is EAGLE's (draft, verify, extend): the MTP layer sees the target's hidden states of
    every verified row, so its cache never holds a state that the target did not produce.
    """
    # Draft: K tokens after the bonus token.
    drafted = draft_chain(seed, num_steps, forwards)

    # Verify: the target runs over bonus + draft; row j says what follows draft token j.
    candidates = torch.cat([seed.bonus_tokens[:, None].to(drafted.dtype), drafted], dim=1)
    logits, hidden = forwards.verify(candidates)

    # Accept the target's own draws for as long as they are what was drafted.
    sampled = forwards.sample(logits)
    accept_lens, accept_index = chain.verify_chain(sampled, drafted)

    # Commit.
    new_seq_lens = seq_lens + accept_lens
    forwards.publish(new_seq_lens)

    # Extend: drop token 0 and shift, i.e. row j pairs hidden j with the token sampled after it.
    # Rows past the bonus hold rejected states; the next step overwrites their slots.
    batch = torch.arange(len(seq_lens), device=seq_lens.device)
    last = accept_lens.long() - 1
    first_tokens, last_hidden = forwards.extend(sampled, hidden, batch * (num_steps + 1) + last)
    return StepResult(
        sampled=sampled,
        accept_lens=accept_lens,
        accept_index=accept_index,
        new_seq_lens=new_seq_lens,
        seed=DraftSeed(
            bonus_tokens=sampled[batch, last],
            first_tokens=first_tokens,
            hidden_states=last_hidden,
        ),
    )
