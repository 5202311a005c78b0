"""Chooses the body of the integer products on CPU by what it computes here, before weights load.

Several int8 products of PyTorch saturate at 16 bits on processors without VNNI and are silently
wrong there: oneDNN's, fbgemm's (pytorch #44939). So a candidate multiplies random codes and the
largest ones, and serves only if its sums are those of int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

PACKAGE = "sglang_ascend.ops.quantized"
# Rows in a tile and alone, of either; columns in vectors and behind them.
ROWS, OUT, WIDTH = 5, 7, 1560


@dataclass(frozen=True)
class Candidate:
    """A body of ``integer_linear``: its module is imported when it is tried."""

    name: str
    needs: str
    module: str


# In the order of speed.
CANDIDATES = (
    Candidate("numba", "numba", f"{PACKAGE}.numba_integer"),
    Candidate("fbgemm", "torch", f"{PACKAGE}.fbgemm"),
)


def largest_error(prepare: Callable[..., Any], linear: Callable[..., torch.Tensor]) -> int:
    """How far the products of a body are from int64 arithmetic; 0 is exact.

    Every row has a 127 among its inputs: its scale is 1, and its codes are the inputs themselves.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-128, 128, (OUT, WIDTH), generator=generator)
    inputs = torch.randint(-127, 128, (ROWS, WIDTH), generator=generator)
    inputs[:, 0] = 127
    largest = torch.full_like(weights, 127), torch.full_like(inputs, 127)
    error = 0.0
    for matrix, rows in ((weights, inputs), largest, (-largest[0], largest[1])):
        weight = prepare(matrix.to(torch.int8), torch.ones(OUT, 1, dtype=torch.float32))
        found = linear(rows.float(), weight)
        exact = (rows @ matrix.T).float()
        error = max(error, (found - exact).abs().max().item())
    return int(error)


@cache
def verdicts() -> dict[str, str]:
    """Of each candidate: "exact", "errs by N", or what is missing."""
    found = {}
    for candidate in CANDIDATES:
        if find_spec(candidate.needs) is None:
            found[candidate.name] = f"{candidate.needs} is not installed"
            continue
        module = import_module(candidate.module)
        if not getattr(module, "is_available", lambda: True)():
            found[candidate.name] = "PyTorch was built without it"
            continue
        error = largest_error(module.prepare_integer, module.integer_linear)
        found[candidate.name] = f"errs by {error}" if error else "exact"
    return found


def is_chosen(name: str) -> bool:
    """The first exact candidate; where there is none the reference serves."""
    exact = [body for body, verdict in verdicts().items() if verdict == "exact"]
    return exact[:1] == [name]
