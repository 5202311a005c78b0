"""On a GPU nothing is timed before it is right, and without one nothing is claimed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import flashinfer_mla, gpu_correctness, on_gpu
from sglang_ascend.verify.checks import Check


def test_without_a_gpu_nothing_is_claimed():
    command = [sys.executable, "-m", "benchmarks.on_gpu"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}

    def run(*flags: str) -> str:
        words = [*command, *flags]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    report = json.loads(run("--json"))
    assert report["device"] is report["correct"] is report["serving"] is None
    assert report["checks"] == report["mla_verify"] == report["top_k_top_p"] == []
    assert run() == "No CUDA device here: nothing was measured.\n"


@pytest.fixture
def a_gpu(monkeypatch) -> list[str]:
    """One by name only; collects what is timed on it."""
    timed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(on_gpu.mla_verify, "measure", lambda case, *rest: timed.append("mla"))

    def filtered(case: Any, *rest: Any) -> dict[str, float]:
        timed.append("filter")
        if case.top_k == 1:
            raise RuntimeError("no such kernel")
        return {"ours_us": 1.0}

    monkeypatch.setattr(on_gpu.top_k_top_p, "measure", filtered)
    return timed


def test_a_wrong_kernel_is_not_timed(a_gpu, monkeypatch):
    wrong = [Check("a", True), Check("b", False)]
    monkeypatch.setattr(gpu_correctness, "check_kernels", lambda *arguments: wrong)
    report = on_gpu.examine(model=None, rounds=1)
    assert report["correct"] is False and a_gpu == []


def test_what_cannot_be_measured_says_so_and_the_rest_is_measured(a_gpu, monkeypatch):
    right = [Check("a", True), Check("b", None)]
    monkeypatch.setattr(gpu_correctness, "check_kernels", lambda *arguments: right)
    report = on_gpu.examine(model=None, rounds=1)
    assert report["correct"] is True
    assert a_gpu.count("mla") == len(report["mla_verify"]) == 6
    rows = report["top_k_top_p"]
    assert [row for row in rows if "failed" in row] == 2 * [
        {"failed": "RuntimeError: no such kernel"}
    ]
    assert len([row for row in rows if "ours_us" in row]) == len(rows) - 2 > 0


def test_a_peer_is_timed_only_if_it_computes_the_same(monkeypatch):
    same = torch.ones(4)
    assert flashinfer_mla.agrees(same, same + 2**-7)
    assert not flashinfer_mla.agrees(same, same + 2**-4)
    monkeypatch.setattr(flashinfer_mla, "find_spec", lambda name: None)
    assert flashinfer_mla.layer_of(*[None] * 3, 1, 1, 1, 1, 1.0) is None  # type: ignore[arg-type]
