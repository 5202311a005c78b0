"""python -m npu_emulation.mutated_ranks MISTAKE ARGUMENTS...: as npu_emulation.serve, and the ranks
make a mistake."""

from __future__ import annotations

import sys
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator

from npu_emulation import serve
from sglang_ascend.plugin.mtp import batch_sampling


def no_all_reduce() -> None:
    """Each rank goes on with its own part of a sum."""

    def own_part(group: Any, part: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return part

    GroupCoordinator.all_reduce = own_part


def own_draws() -> None:
    """Each rank keeps what it drew itself."""
    batch_sampling.accepted_of_first_rank = lambda *accepted: accepted


MISTAKES = {mistake.__name__: mistake for mistake in (no_all_reduce, own_draws)}

if __name__ == "__main__":
    MISTAKES[sys.argv.pop(1)]()
    serve.main()
