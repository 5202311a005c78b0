"""The chosen integer products are int64's on processors without VNNI too; a body that saturates at
16 bits, as several of PyTorch's do there, is found by the probe and not chosen.

Processors are stood in for by limits: oneDNN's and PyTorch's instruction sets, and what Numba
compiles for. Each runs in a process of its own, for the limits are read once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processors import HASWELL

from sglang_ascend.ops.quantized import fbgemm, integer, probe

# Multiplies random codes and all +-127 by the body that the probe chose, by every body that it
# calls exact, and by oneDNN's product.
PROGRAM = """
import json, torch
from sglang_ascend.ops import quantized
from sglang_ascend.ops.dispatch import OPS
from sglang_ascend.ops.quantized import integer, probe

def error(name):
    own = OPS["quantized.prepare_integer"]._implementations
    prepare = own[name if name in own else "reference"].function
    linear = OPS["quantized.integer_linear"].implementation(name)
    generator, largest = torch.Generator().manual_seed(1), 0
    for rows, out, width in ((1, 33, 576), (4, 33, 1536), (9, 5, 4099)):
        random = torch.randint(-127, 128, (out, width), generator=generator)
        inputs = torch.randint(-127, 128, (rows, width), generator=generator)
        inputs[:, -1] = 127  # so that the scale of a row is 1
        full, ones = torch.full_like(random, 127), torch.full_like(inputs, 127)
        for w, x in ((random, inputs), (full, ones), (-full, ones), (full, inputs)):
            found = linear(x.float(), prepare(w.to(torch.int8), torch.ones(out, 1)))
            largest = max(largest, (found - (x @ w.T).float()).abs().max().item())
    return largest

def saturating(x, weight):
    return torch._int_mm(x.to(torch.int8), weight.codes.T).float()

verdicts = probe.verdicts()
exact = [name for name, verdict in verdicts.items() if verdict == "exact"]
print(json.dumps({
    "chosen": OPS["quantized.integer_linear"].choose("cpu").name,
    "errors": {name: error(name) for name in exact},
    "onednn": probe.largest_error(integer.prepare_integer, saturating),
}))
"""
LIMITS = {
    "none": {},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX2 for Numba too": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", **HASWELL},
    "AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """Where the first process of those that Numba compiles alike for leaves what it compiled."""
    return tmp_path_factory.mktemp("compiled")


def under(limits: dict[str, str], compiled: Path) -> dict:
    environment = {**os.environ, **limits, "NUMBA_CACHE_DIR": str(compiled)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


@pytest.mark.parametrize("limits", LIMITS)
def test_what_is_chosen_is_exact(limits, compiled):
    found = under(LIMITS[limits], compiled)
    assert found["chosen"] == "numba"
    assert found["errors"]["numba"] == 0 and not any(found["errors"].values())
    # Some product saturates from AVX2 up to AVX-512 without VNNI: oneDNN's where the processor has
    # AVX-512 and is limited, FBGEMM's where it has no more than AVX2.
    if limits.startswith("AVX2") and torch.cpu._is_avx2_supported():
        is_found = found["onednn"] > 0
        if not torch.cpu._is_avx512_supported():
            is_found = is_found or "fbgemm" not in found["errors"]
        assert is_found


def saturating_linear(x: torch.Tensor, weight) -> torch.Tensor:
    """As vpmaddubsw adds: two products of an unsigned and a signed byte, kept in 16 bits."""
    products = (x[:, None].int() + 128) * weight.codes.int()
    pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(-1) - 128 * weight.codes.int().sum(-1)).float()


def test_the_probe_finds_a_product_that_saturates():
    assert probe.largest_error(integer.prepare_integer, saturating_linear) > 0
    assert probe.largest_error(integer.prepare_integer, integer.integer_linear) == 0


@pytest.fixture
def fresh_verdicts():
    probe.verdicts.cache_clear()
    yield
    probe.verdicts.cache_clear()


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_candidate_that_errs_is_named_and_passed_over(monkeypatch):
    monkeypatch.setattr(fbgemm, "integer_linear", lambda x, w: integer.integer_linear(x, w) + 4096)
    monkeypatch.setattr(fbgemm, "prepare_integer", integer.prepare_integer)
    monkeypatch.setattr(probe, "CANDIDATES", probe.CANDIDATES[::-1])
    assert list(probe.verdicts().items()) == [("fbgemm", "errs by 4096"), ("numba", "exact")]
    assert probe.is_chosen("numba") and not probe.is_chosen("fbgemm")


@pytest.mark.usefixtures("fresh_verdicts")
def test_without_numba_the_next_exact_one_is_chosen(monkeypatch):
    monkeypatch.setattr(probe, "find_spec", lambda name: None if name == "numba" else name)
    verdicts = probe.verdicts()
    assert verdicts["numba"] == "numba is not installed"
    assert probe.is_chosen("fbgemm") is (verdicts["fbgemm"] == "exact")
