"""The machine that a figure was taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine() -> str:
    """CPU model, usable cores, torch version: one line for a table's title."""
    try:
        return f"{cpu_name()}, torch {version('torch')}"
    except PackageNotFoundError:  # a client of servers elsewhere
        return cpu_name()


def cpu_name() -> str:
    """CPU model and usable cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    model = next(models, platform.processor() or platform.machine())
    # A client of servers elsewhere may be no Linux, and then a process has all cores.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {usable} cores"
