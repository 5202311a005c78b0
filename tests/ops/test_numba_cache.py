"""A compiled kernel is loaded only while the files that it was compiled of are what they were,
those of the functions that it calls too; and then it is loaded, wherever it is kept.

Each start is a process that gates a row of ones in a copy of the package; the oracle is arithmetic.
"""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from begun import template

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_ascend"
# What begins a process has imported of the package itself is forgotten.
PROGRAM = """
import json, sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_ascend"]:
    del sys.modules[name]
from sglang_ascend.ops.layers import numba as layers

gated = layers.swiglu(torch.ones(1, 32))[0, 0].item()
stats = layers.gate_rows.stats
counts = sum(stats.cache_hits.values()), sum(stats.cache_misses.values())
print(json.dumps([layers.__file__, gated, counts]))
"""
LOADED, COMPILED = (1, 0), (0, 1)


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of the sources, beside which nothing is compiled."""
    others = shutil.ignore_patterns("__pycache__", "artifacts")
    return shutil.copytree(PACKAGE, tmp_path / "copy" / "sglang_ascend", ignore=others)


def start(package: Path, **variables: str) -> tuple[float, tuple[int, int]]:
    """What the row is gated to, and how often the kernel was loaded and compiled."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), **variables}
    done = template().run_text(PROGRAM, [], environment, 300)
    assert done.returncode == 0, done.stderr
    ran, gated, counts = json.loads(done.stdout)
    assert Path(ran).is_relative_to(package)
    return gated, tuple(counts)


def double_exp(package: Path) -> None:
    """Of a file that no kernel lies in."""
    helpers = package / "ops" / "numba_floats.py"
    source = helpers.read_text(encoding="utf-8")
    assert source.count("return series * power") == 1
    doubled = source.replace("return series * power", "return series * power * np.float32(2)")
    helpers.write_text(doubled, encoding="utf-8")


def gated_by(exp_of_minus_one: float):
    return pytest.approx(1 / (1 + exp_of_minus_one), rel=1e-6)


@pytest.mark.parametrize("place", ["beside the sources", "the user's", "NUMBA_CACHE_DIR"])
def test_a_changed_function_of_another_file_is_compiled_and_else_nothing_is(
    package, place, tmp_path
):
    variables = {"NUMBA_CACHE_DIR": str(tmp_path) if place == "NUMBA_CACHE_DIR" else ""}
    if place == "the user's":  # a package that nobody may write to
        (package / "ops" / "layers" / "__pycache__").touch()
        variables["XDG_CACHE_HOME"] = str(tmp_path)
    assert start(package, **variables) == (gated_by(math.exp(-1)), COMPILED)
    for path in package.rglob("*.py"):
        os.utime(path)
    assert start(package, **variables) == (gated_by(math.exp(-1)), LOADED)
    double_exp(package)
    assert start(package, **variables) == (gated_by(2 * math.exp(-1)), COMPILED)


def test_the_control_numba_s_own_rule_runs_what_was_compiled_before(package):
    variables = {"NUMBA_CACHE_DIR": "", "NUMBA_CACHE_LOCATOR_CLASSES": "InTreeCacheLocator"}
    assert start(package, **variables) == (gated_by(math.exp(-1)), COMPILED)
    double_exp(package)
    assert start(package, **variables) == (gated_by(math.exp(-1)), LOADED)


def kept_otherwise(source: str) -> list[int]:
    """The lines that ask Numba for a cache themselves."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and any(keyword.arg == "cache" for keyword in node.keywords)
    ]


def test_every_kernel_that_is_kept_is_kept_by_this_rule():
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {path.name: kept_otherwise(source) for path, source in sources.items()}
    assert {name for name, lines in found.items() if lines} == {"numba_cache.py"}


def test_the_control_a_kernel_that_is_kept_otherwise_is_found():
    source = "@njit(nogil=True)\ndef a(): ...\n\n@numba.njit(cache=True)\ndef b(): ..."
    assert kept_otherwise(source) == [4]
