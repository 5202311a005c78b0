"""THE step: verify the drafted chain, keep what the target says, draft the next chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_ascend.ops import chain
from sglang_ascend.ops.chain.reference import StepInputs, TailInputs


@dataclass(frozen=True)
class Requests:
    """The running requests: their committed lengths, and where their KV slots are listed."""

    seq_lens: torch.Tensor  # int64 [batch], tokens in the target's cache
    req_pool_indices: torch.Tensor  # int [batch], row in req_to_token
    req_to_token: torch.Tensor  # int [rows, max_context_len], position -> slot
    max_kv_len: int  # host bound, at least seq_len + 2K of every request
    page_size: int = 1  # slots that are allocated together


@dataclass(frozen=True)
class StepResult:
    """One step's outcome."""

    sampled: torch.Tensor  # int64 [batch, K+1]; the first accept_lens of a row are emitted
    accept_lens: torch.Tensor  # int32 [batch], in 1..K+1
    new_seq_lens: torch.Tensor  # int64 [batch], committed tokens after the step
    candidates: torch.Tensor  # int64 [batch, K+1], the next step's rows: bonus, then its chain


class Models(Protocol):
    """The models as the step sees them. Each forward writes the KV slots of its rows.

    Draft tokens are ids of the target's vocabulary, whatever the draft head covers.
    """

    def verify(self, inputs: StepInputs, candidates: torch.Tensor) -> tuple:
        """Target over the [batch, K+1] rows -> (logits, hidden states) per row."""
        ...

    def accept(self, logits: torch.Tensor, candidates: torch.Tensor) -> tuple:
        """How many drafts of each chain are kept, and what follows the last of them
        -> (int64 [batch, K+1] tokens, of which accept_lens are emitted; int32 [batch] accept_lens,
        the one after the drafts included).

        Draws with the requests' own sampling parameters; any policy that gives each emitted token
        the target's distribution is lossless.
        """
        ...

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        """Tells the scheduler the committed lengths, so that it prepares the next step."""
        ...

    def extend(self, tokens: torch.Tensor, hidden: torch.Tensor, last_rows: torch.Tensor) -> tuple:
        """MTP over the rows of ``verify`` -> (draft token, MTP hidden state) of ``last_rows``,
        flat row numbers, one per request."""
        ...

    def tail(self, j: int, tail: TailInputs, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple:
        """MTP over one row per request, the j-th (from 0) of ``tail`` -> as ``extend``."""
        ...


class StepConstants:
    """What no step changes, made once per device: index ramps of K drafted tokens."""

    def __init__(self, num_steps: int, max_batch_size: int, device: torch.device | str) -> None:
        self.num_steps = num_steps
        self.window = torch.arange(2 * num_steps, device=device)
        self.tail = torch.arange(num_steps - 1, device=device)[:, None]
        # Flat number of the row before each request's first: + accept_len is its last kept row.
        width = num_steps + 1
        self.row_before = torch.arange(-1, max_batch_size * width - 1, width, device=device)


def speculative_step(
    candidates: torch.Tensor, requests: Requests, constants: StepConstants, models: Models
) -> StepResult:
    """One decode step of every request: 1..K+1 tokens emitted, the next K drafted (FusionSpec).

    ``candidates`` [batch, K+1] is the last emitted token of each request, which is in no cache
    yet, and the chain that was drafted after it.
    """
    # Prepare, once: target and MTP layer run on the same positions, slots, lengths, block table.
    inputs = chain.prepare_step(
        requests.seq_lens,
        requests.req_pool_indices,
        requests.req_to_token,
        constants.window,
        requests.max_kv_len,
        requests.page_size,
    )

    # Verify: row j says what follows draft token j.
    logits, hidden = models.verify(inputs, candidates)

    # Accept the longest prefix of the chain that the target stands by, and one token of its own.
    sampled, accept_lens = models.accept(logits, candidates)

    # Commit: from here on the scheduler may prepare the next step.
    new_seq_lens = requests.seq_lens + accept_lens
    models.publish(new_seq_lens)

    # Shift: drop token 0, so that row j pairs the hidden state of token j with token j+1. Rows
    # past the last emitted token hold rejected states; later rows overwrite their slots.
    last_rows = constants.row_before[: len(accept_lens)] + accept_lens
    draft, mtp_hidden = models.extend(sampled, hidden, last_rows)

    # Draft: the shared MTP layer on its own output, K-1 times more (FastMTP).
    next_candidates = [sampled.view(-1)[last_rows], draft]
    tail = chain.place_tail(new_seq_lens, accept_lens, inputs.slots, constants.tail)
    for j in range(constants.num_steps - 1):
        draft, mtp_hidden = models.tail(j, tail, draft, mtp_hidden)
        next_candidates.append(draft)
    return StepResult(sampled, accept_lens, new_seq_lens, torch.stack(next_candidates, dim=1))


class ReplayedModels(Protocol):
    """A step that was captured in two parts, which are replayed around the sampling."""

    def verify(self, requests: Requests, candidates: torch.Tensor) -> torch.Tensor:
        """The captured step up to the logits of the verified rows."""
        ...

    def accept(self, logits: torch.Tensor, candidates: torch.Tensor) -> tuple:
        """As ``Models.accept``."""
        ...

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        """As ``Models.publish``."""
        ...

    def extend(self, sampled: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
        """The captured step from there on -> the next candidates."""
        ...


def replayed_step(
    candidates: torch.Tensor, requests: Requests, models: ReplayedModels
) -> StepResult:
    """``speculative_step`` where a device replays what was captured of it.

    Sampling lies between the two parts, for it depends on what the batch's requests ask for; the
    new lengths are published before the second, as they are there.
    """
    logits = models.verify(requests, candidates)
    sampled, accept_lens = models.accept(logits, candidates)
    new_seq_lens = requests.seq_lens + accept_lens
    models.publish(new_seq_lens)
    next_candidates = models.extend(sampled, accept_lens)
    return StepResult(sampled, accept_lens, new_seq_lens, next_candidates)
