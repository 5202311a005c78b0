"""The roofline of latent attention is the textbook's, and without a GPU nothing is claimed."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.mla_verify import Case

H100 = (3.35e12, 989e12)


def test_few_heads_are_bound_by_the_keys_and_many_by_the_products():
    """By hand: 16 * 8192 keys of 1152 B, and 2176 B of query and output a row and head; 2 * 1088
    FLOP a key, row and head."""
    decode = Case(num_heads=16, query_len=1).roofline_seconds(*H100)
    assert decode == pytest.approx((16 * 8192 * 1152 + 16 * 16 * 2176) / 3.35e12)
    verify = Case(num_heads=128, query_len=4).roofline_seconds(*H100)
    assert verify == pytest.approx(16 * 4 * 128 * 8192 * 2176 / 989e12)


def test_rows_are_free_for_few_heads_only():
    def cost_of_4_rows(num_heads):
        one, four = (Case(num_heads, rows).roofline_seconds(*H100) for rows in (1, 4))
        return four / one

    assert cost_of_4_rows(16) == pytest.approx(1.01, abs=0.005)
    assert cost_of_4_rows(128) == pytest.approx(3.18, abs=0.02)


def test_without_a_gpu_nothing_is_claimed():
    command = [sys.executable, "-m", "benchmarks.mla_verify", "--json"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout)
    assert (report["device"], report["cases"]) == (None, [])
