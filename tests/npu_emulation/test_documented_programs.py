"""The programs that docs/ runs on the emulated NPU run, in their short form."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.npu_step import AUTOLOAD

TIMEOUT_S = 900


def run(*words: str, **environ: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", *words],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_short_run_of_bench_npu_step_counts_the_steps_of_three_servers():
    printed = run("benchmarks.npu_step", "--smoke", "--json", **{AUTOLOAD: "0"})
    report = json.loads(printed)
    assert report["machine"].startswith("emulated NPU on ")
    launches = {name: report[name]["launches"] for name in ("plain", "eagle", "mtp")}
    assert 0 < launches["mtp"] < launches["plain"] < launches["eagle"]
