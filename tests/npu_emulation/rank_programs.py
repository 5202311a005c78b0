"""Programs that two ranks run on their emulated NPUs, each rank a process, and what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  (registers the device)

from npu_emulation.counters import left_undone
from npu_emulation.environment import DEVICES
from npu_emulation.numerics import Numerics

RANKS = 2


def found_by_ranks(module: str, folder: Path) -> list[dict[str, Any]]:
    """By rank: what each program of `module` returned."""
    command = [sys.executable, "-m", f"npu_emulation.{module}"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env=os.environ | {DEVICES: str(RANKS)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 0, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@cache
def _hosts() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo")


def hosts_meet() -> None:
    """No host waits in a collective until all are here, so no device has to go on for a peer."""
    dist.barrier(_hosts())


def main(*programs: Callable[[int], Any]) -> None:
    """The arguments are RANK and FOLDER, which is where the ranks meet and gets RANK.json."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.npu.set_device(rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("hccl", init_method=meeting, rank=rank, world_size=RANKS)
    with Numerics():
        found = {program.__name__: program(rank) for program in programs}
        hosts_meet()  # the devices may have parted
    found["left_undone"] = left_undone()
    (folder / f"{rank}.json").write_text(json.dumps(found))
