"""Definition of top-k then top-p by one threshold per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

# Consecutive logits that share one maximum: a group is what a second look reads at once.
GROUP_SIZE = 64


@dataclass(frozen=True)
class Kept:
    """Which tokens of each row may be drawn: those with a finite logit >= ``threshold``.

    Token i of a row has probability exp(logits[i] - max) / mass if it is kept and 0 if not. A row
    that no token can be drawn from (a NaN, a +inf, nothing finite) has NaN in place of threshold
    and mass, so it keeps nothing; where the tensors are on the host already the operators raise.
    All are contiguous.
    """

    threshold: torch.Tensor  # float32 [rows], finite; not always a logit of the row
    max: torch.Tensor  # float32 [rows], the largest logit
    mass: torch.Tensor  # float32 [rows], sum over kept tokens of exp(logit - max), from 1 on
    group_max: torch.Tensor  # float32 [rows, groups], largest logit of each GROUP_SIZE in turn

    def check(self) -> None:
        """Raises ValueError if a row is invalid. Synchronises: call it where the host waits anyway.

        The operators call it themselves on CPU tensors.
        """
        invalid = self.mass.isnan().nonzero()[:, 0].tolist()
        if invalid:
            raise ValueError(
                f"logits rows {invalid[:8]} ({len(invalid)} of {len(self.mass)}) hold a NaN, a +inf"
                " or nothing finite, so no token can be drawn: look at the forward that made them,"
                " or at a grammar or logit_bias that forbids every token."
            )

    def checked_on_host(self) -> Kept:
        if self.mass.device.type == "cpu":
            self.check()
        return self


def top_k_top_p(
    logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, joint: bool = False
) -> Kept:
    """Top-k, then top-p of what it left, as ``npu_top_k_top_p`` has them (sequential semantics).

    With t_k the top_k-th largest logit of a row (its smallest, if there are fewer) and Z_k the sum
    of exp(x - max) over x >= t_k, the threshold is the largest t >= t_k for which

        sum over x >= t of exp(x - max)  >=  top_p * Z_k

    so a token is dropped when the mass of it and all smaller ones is at most 1 - top_p. Tokens
    equal to the threshold are all kept, by top-k too. top_p >= 1 drops nothing; top_p <= 0 keeps
    the largest logit. A logit of -inf is never kept.

    With ``joint``, Z_k is the whole row's mass: each filter is judged on the row itself, as in
    ``filter_probs``, which keeps of the tokens equal to the threshold as many as it allows only.

    Args:
        logits: float32, float16 or bfloat16 [rows, vocab_size], scaled by temperature.
        top_ks: int [rows], at least 1; vocab_size or more means no top-k.
        top_ps: float32 [rows].
        joint: whether top_p is a share of the row's mass, and not of what top-k left.

    Raises:
        ValueError: for an invalid row (see ``Kept``) on CPU; elsewhere ``Kept.check`` does.

    Does not synchronise.
    """
    vocab_size = logits.shape[1]
    ordered = logits.float().sort(dim=-1, descending=True).values  # NaN before all
    num_finite = (ordered > -torch.inf).sum(-1)
    rank = top_ks.long().minimum(num_finite).clamp(min=1)[:, None] - 1
    kth, largest = ordered.gather(1, rank), ordered[:, :1]
    everything = (ordered.double() - largest).exp()
    weights = torch.where(ordered >= kth, everything, 0.0)
    masses = weights.cumsum(-1)
    shared = everything.sum(-1, keepdim=True) if joint else masses[:, -1:]
    wanted = top_ps.double()[:, None] * shared
    crossing = (masses < wanted).sum(-1, keepdim=True).clamp(max=vocab_size - 1)
    threshold = torch.where(top_ps[:, None] >= 1, kth, ordered.gather(1, crossing).maximum(kth))
    threshold = torch.where(largest.isfinite(), threshold, torch.nan)
    mass = torch.where(ordered >= threshold, weights, 0.0).sum(-1, keepdim=True)
    mass = torch.where(largest.isfinite(), mass, torch.nan)
    per_row = torch.cat([threshold, largest, mass.float()], dim=1).t().contiguous()
    return Kept(*per_row.unbind(), group_max=group_maxima(logits)).checked_on_host()


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab_size] -> float32 [rows, ceil(vocab_size / GROUP_SIZE)], as in ``Kept``."""
    padded = pad(logits.float(), (0, -logits.shape[1] % GROUP_SIZE), value=-torch.inf)
    return padded.unflatten(1, (-1, GROUP_SIZE)).amax(-1)
