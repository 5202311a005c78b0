"""Training by several processes, as `torchrun` starts them: shards are split, gradients joined.

A step is that of one process over the union of the processes' batches: the gradient of a mean over
all rows is the mean of the processes' gradients, each weighted by its rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang_ascend.files import alone_in
from sglang_ascend.training.trainer import Trainer

Tensor = torch.Tensor


@contextmanager
def trainer_class(out: Path) -> Iterator[type[Trainer]]:
    """`Trainer`, or `ParallelTrainer` with its group where torchrun started several processes; who
    writes is alone in `out`.

    A process that ends with its group open has gloo's threads still running, and is aborted at
    times ("terminate called without an active exception", pytorch issue 190489).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        with alone_in(out):
            yield Trainer
        return
    dist.init_process_group("gloo")
    try:
        with alone_in(out) if dist.get_rank() == 0 else nullcontext():
            yield ParallelTrainer
    finally:
        dist.destroy_process_group()


class ParallelTrainer(Trainer):
    """One of the processes; all begin with the same layer, and the first one writes.

    Raises:
        ValueError: there are fewer shards than processes.
    """

    def _own(self, shards: list[str]) -> list[str]:
        rank, count = dist.get_rank(), dist.get_world_size()
        if len(shards) < count:
            raise ValueError(
                f"{self.data} holds {len(shards)} shards for {count} processes: generate more, or "
                "start as many processes."
            )
        return shards[rank::count]

    def _begin_pass(self, shards: list[str]) -> None:
        """A pass ends with the process that has the fewest batches."""
        super()._begin_pass(shards)
        self.batches = self.batches[: min(_gathered(len(self.batches)))]

    def _joined(self, vocabulary: Tensor) -> Tensor:
        return torch.cat(_gathered(vocabulary.cpu())).unique().to(self.device)

    def _return_gradients(self, num_rows: int) -> None:
        super()._return_gradients(num_rows)
        share = num_rows / sum(_gathered(num_rows))
        for parameter in self.layer.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad *= share
            dist.all_reduce(parameter.grad)

    def _log(self, losses: list[float], num_rows: int) -> None:
        """Of all processes: their rows, and each loss by its rows."""
        every = _gathered((losses, num_rows))
        total = sum(rows for _, rows in every)
        parts = [[loss * rows / total for loss in own] for own, rows in every]
        if dist.get_rank() == 0:
            super()._log([sum(step) for step in zip(*parts, strict=True)], total)

    def _save(self) -> None:
        if dist.get_rank() == 0:
            super()._save()
        dist.barrier()


def _gathered(own: Any) -> list[Any]:
    """What each process has, in the order of their ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every
