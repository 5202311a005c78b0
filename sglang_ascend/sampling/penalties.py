"""Frequency, presence and repetition penalties and min_new_tokens, exact on every verified row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of a token that must not be drawn while another can be: its probability is 0 then. It is finite,
# so that it is drawn where a grammar has left nothing else, which ends the reply; -inf in a whole
# row is no distribution.
BAN = -1e30


@dataclass(frozen=True)
class Penalties:
    """The penalties of a batch; a request without one has the value that changes nothing."""

    frequency: torch.Tensor  # float32 [batch], 0: none
    presence: torch.Tensor  # float32 [batch], 0: none
    repetition: torch.Tensor  # float32 [batch], 1: none
    min_new_tokens: torch.Tensor  # int64 [batch], 0: none
    stop_tokens: torch.Tensor  # bool [batch, vocab_size], forbidden before min_new_tokens


@dataclass(frozen=True)
class Terms:
    """What the penalties of a row do to its logits, each shaped as the logits."""

    additive: torch.Tensor
    scale: torch.Tensor  # 1: none

    def apply(self, logits: torch.Tensor) -> None:
        """l += additive, then l *= scale below 0 and l /= scale above, in place."""
        logits += self.additive
        logits *= torch.where(logits < 0, self.scale, 1 / self.scale)


def terms_of(penalties: Penalties, counts: torch.Tensor, num_output_tokens: torch.Tensor) -> Terms:
    """The penalties of tokens that follow what a request has emitted.

        additive = -frequency * count - presence * [count > 0]
                   and BAN for stop tokens while fewer than min_new_tokens are out
        scale    = repetition where count > 0

    Args:
        counts: float [batch, rows, vocab_size], how often each token was emitted before the row's;
            prompts do not count.
        num_output_tokens: int64 [batch, rows], how many tokens were.

    Does not synchronise.
    """
    seen = counts > 0
    frequency, presence, repetition = (
        value[:, None, None]
        for value in (penalties.frequency, penalties.presence, penalties.repetition)
    )
    too_early = num_output_tokens < penalties.min_new_tokens[:, None]
    forbidden = too_early[:, :, None] & penalties.stop_tokens[:, None]
    additive = -(frequency * counts + presence * seen)
    return Terms(
        additive=additive.masked_fill_(forbidden, BAN),
        scale=torch.where(seen, repetition, 1.0),
    )


class OutputCounts:
    """How often each request emitted each token, its last one excepted: that one is the first row
    of the next step and is counted there.

    Kept on the device, because the host learns of a step's tokens after the next one is launched.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)

    def restart(self, rows: torch.Tensor, tokens: list[list[int]]) -> None:
        """Requests begin, or begin again with what they had emitted, in ``rows`` of the pool
        (int [requests])."""
        vocab_size = self._counts.shape[1]
        counts = [
            torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size)
            for output in tokens
        ]
        self._counts[rows.long()] = torch.stack(counts).to(self._counts, non_blocking=True)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        """The first ``num_kept`` tokens of each row were emitted.

        Args:
            rows: int [batch], of the pool.
            tokens: int64 [batch, width].
            num_kept: int [batch], in 0..width.
        """
        kept = torch.arange(tokens.shape[1], device=tokens.device) < num_kept[:, None]
        rows = rows.long()[:, None].expand_as(tokens)
        self._counts.index_put_((rows, tokens), kept.to(self._counts.dtype), accumulate=True)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [batch, vocab_size] of these rows (int [batch]) of the pool."""
        return self._counts[rows.long()].float()

    def along(self, rows: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """float32 [batch, width, vocab_size]: row j counts candidates 0..j too.

        Args:
            rows: int [batch], of the pool.
            candidates: int64 [batch, width], the last emitted token, then the chain after it.
        """
        width = candidates.shape[1]
        counts = self.of(rows)[:, None].repeat(1, width, 1)
        one = counts.new_ones(1)
        for j in range(width):
            token = candidates[:, j, None, None].expand(-1, width - j, 1)
            counts[:, j:].scatter_add_(2, token, one.expand_as(token))
        return counts
