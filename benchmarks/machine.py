"""What a figure was taken on: the machine and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def taken_on() -> dict[str, str]:
    """The first two keys of every report."""
    return {"machine": describe_machine(), "commit": describe_commit()}


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
    return f"{model}, {cores} cores, torch {torch.__version__}"


def describe_commit() -> str:
    """Of this repository, with "-dirty" where files differ from it; "unknown" outside of git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
