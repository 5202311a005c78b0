"""What a figure was taken on: the machine and the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sglang_ascend.bench.figures.machine import describe_machine

ROOT = Path(__file__).parents[1]

__all__ = ["describe_commit", "describe_machine", "taken_on"]


def taken_on() -> dict[str, str]:
    """The first two keys of every report."""
    return {"machine": describe_machine(), "commit": describe_commit()}


def describe_commit() -> str:
    """Of this repository, with "-dirty" where files differ from it; "unknown" outside of git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
