"""Acceptance that changes the model's replies, for those who ask for it by a name that says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ascend.ops.chain.reference import keep_prefix

SYNTAX = "threshold:RATIO or relaxed:TOP_N,DELTA[,START,END]"


@dataclass(frozen=True)
class Threshold:
    """Keeps a draft drawn from q where p(draft) >= ratio * q(draft): not by chance.

    Greedy requests stay exact: their p is a point mass.
    """

    ratio: float

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """float [batch, K] probabilities of the drafts, under target and draft -> bool."""
        return (p > 0) & (p >= self.ratio * q)


@dataclass(frozen=True)
class Relaxed:
    """Inside a thinking section, keeps a draft that is among the ``top_n`` likeliest tokens and at
    most ``delta`` less probable than the best (TensorRT-LLM's relaxed acceptance)."""

    top_n: int
    delta: float
    start: str = "<think>"
    end: str = "</think>"

    def accepts(self, probs: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """float [batch, K, vocab_size], int64 [batch, K] -> bool [batch, K]."""
        best = probs.topk(min(self.top_n, probs.shape[-1]), dim=-1).values
        p = probs.gather(-1, drafts[..., None])[..., 0]
        return (p >= best[..., -1]) & (p >= best[..., 0] - self.delta)


def parse(text: str) -> Threshold | Relaxed | None:
    """The policy that a user's text asks for, None for an empty one.

    Raises ValueError, whose text completes "must be ...".
    """
    if not text:
        return None
    name, _, values = text.partition(":")
    fields = values.split(",")
    try:
        if name == "threshold" and len(fields) == 1 and 0 < float(fields[0]) <= 1:
            return Threshold(float(fields[0]))
        if name == "relaxed" and len(fields) in (2, 4):
            policy = Relaxed(int(fields[0]), float(fields[1]), *fields[2:])
            if policy.top_n >= 1 and 0 <= policy.delta <= 1:
                return policy
    except ValueError:
        pass
    raise ValueError(f"{SYNTAX}, with 0 < RATIO <= 1, TOP_N >= 1 and 0 <= DELTA <= 1")


def emit(
    accepted: torch.Tensor, drafts: torch.Tensor, drawn: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept drafts, then the target's own draw.

    bool and int64 [batch, K], int64 [batch, K+1] -> (int64 [batch, K+1] tokens, int32 [batch]).
    """
    accept_lens = keep_prefix(accepted)
    rows = torch.arange(drawn.shape[1], device=drawn.device)
    kept = rows < (accept_lens - 1)[:, None]
    padded = torch.nn.functional.pad(drafts, (0, 1))
    return torch.where(kept, padded, drawn), accept_lens
