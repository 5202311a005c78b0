"""The other ranks of a server: each is a process of its own that runs the same command.

Each knows all waves; SGLang broadcasts what the first rank of a request asks for. Each writes its
report.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import begun

from npu_emulation.report import Report

RANK = "NPU_EMULATION_RANK"
TP_SIZE = ("--tp-size", "--tensor-parallel-size")


def own_rank() -> int:
    return int(os.environ.get(RANK, "0"))


class Followers:
    def __init__(self, num_ranks: int, folder: Path, arguments: list[str]) -> None:
        """`arguments` are added to this process's own."""
        self.reports = {rank: folder / f"rank-{rank}.json" for rank in range(1, num_ranks)}
        self.processes = [
            begun.again(["--json", str(report), *arguments], os.environ | {RANK: str(rank)})
            for rank, report in self.reports.items()
        ]
        for process in self.processes:
            threading.Thread(target=end_with, args=(process,), daemon=True).start()

    def finish(self) -> list[Report]:
        for process in self.processes:
            process.wait()
        return [Report.from_json(report.read_text()) for report in self.reports.values()]


def end_with(follower: Any) -> None:
    """A process that stopped would be waited for."""
    if follower.wait() != 0:
        print("npu_emulation: another process of the server stopped.", file=sys.stderr, flush=True)
        os._exit(1)
