"""The step-weighted loss of the recursion: FastMTP's weights over cross-entropy and two extras."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def step_weights(num_steps: int, decay: float = 0.6) -> list[float]:
    """alpha_k = decay^(k-1) / sum_j decay^(j-1) (FastMTP, arXiv 2509.18362, eq. 2)."""
    powers = [decay**step for step in range(num_steps)]
    return [power / sum(powers) for power in powers]


@dataclass(frozen=True)
class LossConfig:
    """Weights of the loss's parts. FastMTP itself is hard_weight 1, soft_weight 0, hidden 0."""

    num_steps: int = 3
    decay: float = 0.6
    hard_weight: float = 0.0  # cross-entropy with the generated token
    soft_weight: float = 1.0  # cross-entropy with the target's distribution
    hidden_weight: float = 1.0  # smooth-L1 to the target's own hidden (EAGLE, arXiv 2401.15077)


def chain_loss(
    outputs: list[Tensor],
    hidden: Tensor,
    tokens: Tensor,
    rows: tuple[Tensor, Tensor],
    head: Tensor,
    vocabulary: Tensor,
    config: LossConfig,
) -> tuple[Tensor, list[float]]:
    """Loss over the chosen target positions, and each step's cross-entropy for the log.

    Args:
        outputs: `interface.run_chain`'s result.
        hidden: [batch, length, hidden_size] of the target.
        tokens: int64 [batch, length].
        rows: (sequence, position) index pairs; position p asks for the distribution of token
            p + 1, which step k predicts from slot p - k. Every p must be at least num_steps.
        head: [len(vocabulary), hidden_size], the frozen head's rows for `vocabulary`.
        vocabulary: int64 sorted ids the softmax is restricted to; holds every label token.
    """
    sequence, position = rows
    teacher = hidden[sequence, position]
    labels = torch.searchsorted(vocabulary, tokens[sequence, position + 1])
    with torch.no_grad():
        probs = F.linear(teacher, head).softmax(-1) if config.soft_weight else None
    total, losses = torch.zeros(()), []
    for step, weight in enumerate(step_weights(config.num_steps, config.decay), start=1):
        output = outputs[step - 1][sequence, position - step]
        loss = torch.zeros(())
        if config.soft_weight or config.hard_weight:
            logits = F.linear(output, head)
            if probs is not None:
                loss = loss + config.soft_weight * F.cross_entropy(logits, probs)
            if config.hard_weight:
                loss = loss + config.hard_weight * F.cross_entropy(logits, labels)
        losses.append(loss.item())
        if config.hidden_weight:
            loss = loss + config.hidden_weight * F.smooth_l1_loss(output, teacher)
        total = total + weight * loss
    return total, losses
