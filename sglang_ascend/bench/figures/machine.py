"""The machine that a figure was taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine() -> str:
    """CPU model, usable cores, torch version: one line for a table's title."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0))
    try:
        return f"{model}, {cores} cores, torch {version('torch')}"
    except PackageNotFoundError:  # a client of servers elsewhere
        return f"{model}, {cores} cores"
