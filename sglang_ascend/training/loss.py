"""The step-weighted loss of the recursion: FastMTP's weights over one of several distances.

p is the target's distribution, q the draft's. Speculative sampling accepts a draft with probability
alpha = sum min(p, q) (Leviathan et al., arXiv 2211.17192): `tv` and `lk` train that itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def step_weights(num_steps: int, decay: float = 0.6) -> list[float]:
    """alpha_k = decay^(k-1) / sum_j decay^(j-1) (FastMTP, arXiv 2509.18362, eq. 2)."""
    powers = [decay**step for step in range(num_steps)]
    return [power / sum(powers) for power in powers]


@dataclass(frozen=True)
class LossConfig:
    """What is trained. FastMTP itself is kind "ce" and hidden_weight 0."""

    num_steps: int = 3
    decay: float = 0.6
    kind: str = "kl"  # a key of `LOSSES`
    eta: float = 3.0  # of "hybrid"
    hidden_weight: float = 1.0  # smooth-L1 to the target's own hidden (EAGLE, arXiv 2401.15077)
    replay: float = 2.0  # weight of a rejected draft beside an accepted one, on policy

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise ValueError(f"--loss {self.kind} is none of {', '.join(LOSSES)}.")


@dataclass(frozen=True)
class Teacher:
    """What the target says at each row: labels int64 [rows], probs [rows, vocabulary]."""

    labels: Tensor
    probs: Tensor

    @cached_property
    def negative_entropy(self) -> Tensor:
        """sum p log p."""
        return torch.xlogy(self.probs, self.probs).sum(-1)


def cross_entropy(log_q: Tensor, teacher: Teacher, eta: float) -> Tensor:
    """-log q(label): learns the target's token, not its distribution."""
    return -log_q.gather(1, teacher.labels[:, None])[:, 0]


def kl_divergence(log_q: Tensor, teacher: Teacher, eta: float) -> Tensor:
    """KL(p | q) = sum p (log p - log q)."""
    return teacher.negative_entropy - (teacher.probs * log_q).sum(-1)


def total_variation(log_q: Tensor, teacher: Teacher, eta: float) -> Tensor:
    """1 - alpha. It has hardly a gradient where p and q are far apart."""
    return 1 - acceptance(log_q, teacher)


def log_acceptance(log_q: Tensor, teacher: Teacher, eta: float) -> Tensor:
    """-log alpha."""
    return -acceptance(log_q, teacher).clamp_min(1e-6).log()


def hybrid(log_q: Tensor, teacher: Teacher, eta: float) -> Tensor:
    """From KL to -log alpha as the drafts become better: the share of KL is exp(-eta * alpha),
    with the rows' mean alpha taken as a constant."""
    share = math.exp(-eta * acceptance(log_q.detach(), teacher).mean().item())
    divergence = kl_divergence(log_q, teacher, eta)
    return share * divergence + (1 - share) * log_acceptance(log_q, teacher, eta)


def acceptance(log_q: Tensor, teacher: Teacher) -> Tensor:
    """alpha = sum min(p, q)."""
    return torch.minimum(teacher.probs, log_q.exp()).sum(-1)


# Each maps log q [rows, vocabulary] and the teacher to one value a row; eta is `hybrid`'s.
LOSSES: dict[str, Callable[[Tensor, Teacher, float], Tensor]] = {
    "ce": cross_entropy,
    "kl": kl_divergence,
    "tv": total_variation,
    "lk": log_acceptance,
    "hybrid": hybrid,
}


def on_policy_weights(
    accepted: list[Tensor], rows: tuple[Tensor, Tensor], shape: tuple[int, int], replay: float
) -> list[Tensor]:
    """What each row of each step counts where a server verifies chains of these drafts.

    Verification stops at a chain's first wrong draft: a row counts if every earlier draft of its
    chain was accepted, and `replay` times if its own is the one that is rejected (after Draft-OPD,
    arXiv 2605.29343). Tokens that are in no row, such as a prompt's, are never drafted.

    Args:
        accepted: of each step bool [rows], whether the draft is the target's token.
        rows: as `chain_loss`'s; step k's draft at position p is of the chain from slot p - k.
        shape: (batch, length).

    Returns:
        of each step float32 [rows].
    """
    sequence, position = rows
    reached = torch.ones(shape, dtype=torch.bool, device=position.device)  # by chain
    weights = []
    for step, right in enumerate(accepted, start=1):
        chain = (sequence, position - step)
        here = reached[chain]
        weights.append(torch.where(right, 1.0, replay) * here)
        reached = torch.zeros_like(reached).index_put(chain, here & right)
    return weights


def chain_loss(
    outputs: list[Tensor],
    hidden: Tensor,
    tokens: Tensor,
    rows: tuple[Tensor, Tensor],
    heads: tuple[Tensor, Tensor],
    vocabulary: Tensor,
    config: LossConfig,
    on_policy: bool = False,
) -> tuple[Tensor, list[float]]:
    """Loss over the chosen target positions, and each step's distance for the log.

    Args:
        outputs: `interface.run_chain`'s result.
        hidden: [batch, length, hidden_size] of the target.
        tokens: int64 [batch, length].
        rows: (sequence, position) index pairs; position p asks for the distribution of token
            p + 1, which step k predicts from slot p - k. Every p must be at least num_steps.
        heads: the target's and the drafts', [len(vocabulary), hidden_size] each, the frozen rows
            for `vocabulary`; twice the same for an MTP layer.
        vocabulary: int64 sorted ids the softmax is restricted to; holds every label token.
        on_policy: whether rows count by `on_policy_weights` of the drafts that are made here,
            rather than all alike.
    """
    sequence, position = rows
    wanted = hidden[sequence, position]
    with torch.no_grad():
        teacher = Teacher(
            torch.searchsorted(vocabulary, tokens[sequence, position + 1]),
            F.linear(wanted, heads[0]).float().softmax(-1),
        )
    chosen = [outputs[step][sequence, position - step - 1] for step in range(config.num_steps)]
    drafts = [F.linear(output, heads[1]).float().log_softmax(-1) for output in chosen]
    weights: list[Tensor | None] = [None] * config.num_steps
    if on_policy:
        accepted = [log_q.argmax(-1) == teacher.labels for log_q in drafts]
        weights = [*on_policy_weights(accepted, rows, (len(tokens), len(tokens[0])), config.replay)]
    total, losses = torch.zeros((), device=hidden.device), []
    shares = step_weights(config.num_steps, config.decay)
    for share, output, log_q, weight in zip(shares, chosen, drafts, weights, strict=True):
        loss = _mean(LOSSES[config.kind](log_q, teacher, config.eta), weight)
        losses.append(loss.item())
        if config.hidden_weight:
            distance = F.smooth_l1_loss(output.float(), wanted.float(), reduction="none")
            loss = loss + config.hidden_weight * _mean(distance.mean(-1), weight)
        total = total + share * loss
    return total, losses


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Of all rows, or weighted; zero where no row counts."""
    if weight is None:
        return values.mean()
    return (values * weight).sum() / weight.sum().clamp_min(1)
