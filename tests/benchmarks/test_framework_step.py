"""The three servers of the framework benchmark start, and every step is timed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

KEYS = ("plain_ms", "eagle_ms", "mtp_ms")


@pytest.mark.slow
@pytest.mark.sglang
def test_it_reports_milliseconds_of_each_server():
    flags = "--batch 2 --rounds 1 --steps 5 --json".split()
    command = [sys.executable, "-m", "benchmarks.framework_step", *flags]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout)
    assert all(0 < report["batch_2"][key] < 1000 for key in KEYS)
