"""Which rows go to the ranks of their experts, and what `deep_ep` says of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class ExchangeError(RuntimeError):
    """What a device would do wrong in silence, or hang at."""


class EventOverlap:
    """Every kernel is queued on the stream that is current: nothing is left to wait for."""

    def current_stream_wait(self) -> None:
        pass


class Config:
    """Sizes of the real buffers, of which there are none."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class Handle:
    """What a dispatch leaves for its combine."""

    experts: Tensor  # [ranks, most tokens of a rank, k], -1 for none: every rank's choices
    topk_weights: Tensor | None  # [tokens, k]; None where the combine is given them
    num_tokens: int
    most_rows: int  # that a rank has taken
    num_local_experts: int
    hidden: int


def rows_of_rank(experts: Tensor, rank: int, num_local_experts: int) -> tuple[Tensor, Tensor]:
    """(the flat choice of each row that the rank takes: sorted by expert, then by rank, token and
    place in its top k; rows of each of its experts)."""
    local = experts.flatten() - rank * num_local_experts
    (taken,) = ((local >= 0) & (local < num_local_experts)).nonzero(as_tuple=True)
    order = local[taken].argsort(stable=True)
    return taken[order], local[taken].bincount(minlength=num_local_experts)


def lay_out(topk_idx: Tensor, of_ranks: Tensor, of_experts: Tensor, is_for: Tensor) -> None:
    chosen = torch.nn.functional.one_hot(topk_idx + 1, len(of_experts) + 1)[..., 1:].sum(1)
    of_experts.copy_(chosen.sum(0))
    is_for.copy_(chosen.view(len(topk_idx), len(of_ranks), -1).sum(-1) > 0)
    of_ranks.copy_(is_for.sum(0))


def make_up(rows: Tensor, made_up: Tensor) -> None:
    made_up[: len(rows)] = rows
    made_up[len(rows) :] = -1
