"""Every call of torch_npu in this package, found in its syntax, is made: on each SoC's Meta kernels
under the real schemas, and on the emulated device; and none breaks a rule of the documentation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import sglang_ascend
from sglang_ascend.ops.dispatch import OPS, load_operators
from sglang_ascend.ops.npu import CONSTRAINTS, CheckedCalls
from sglang_ascend.verify.operators.against_reference import bound_calls

PACKAGE = Path(sglang_ascend.__file__).parent
NAMESPACES = ("torch.ops.npu", "torch.ops.atb", "torch_npu")
# What checks a call may ask about its tensors.
OF_CHECKS = "ops/npu/"
load_operators()
BODIES = sorted(name for name, op in OPS.items() if "npu" in op._implementations)
# An operator without a Meta kernel, and the body that calls it: made on the device alone.
WITHOUT_META = {
    "npu_convert_weight_to_int4pack": "quantized.prepare_weight_only",
    "npu_format_cast": "quantized.prepare_integer",
}
ON_META = [name for name in BODIES if name not in WITHOUT_META.values()]
Site = tuple[str, int]  # file and line


def call_sites(folder: Path) -> dict[Site, str]:
    """Where an operator of torch_npu is named, be it in a call or to be called by another name."""
    sites: dict[Site, str] = {}
    for path in sorted(folder.rglob("*.py")):
        place = str(path.relative_to(folder))
        if place.startswith(OF_CHECKS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in NAMESPACES:
                sites[place, node.lineno] = node.attr
            elif isinstance(node, ast.ImportFrom) and node.module == "torch_npu":
                sites[place, node.lineno] = node.names[0].name
    return sites


SITES = call_sites(PACKAGE)


@contextmanager
def sites_run() -> Iterator[set[Site]]:
    """Those of SITES whose lines run in the block."""
    run: set[Site] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return None
        site = str(path.relative_to(PACKAGE)), frame.f_lineno
        if site in SITES:
            run.add(site)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield run
    finally:
        sys.settrace(before)


def make(names: list[str], device: str) -> None:
    """Calls the bodies, each call of torch_npu checked."""
    with CheckedCalls() as checked:
        for call in bound_calls(device):
            if call.op.name in names and call.dtype is call.case.dtypes[0]:
                args, kwargs = call.prepare(device)
                call.op.implementation("npu")(*args, **kwargs)
    assert not checked.unknown


def test_every_operator_that_is_called_has_its_constraints():
    assert SITES and BODIES
    assert {site: name for site, name in SITES.items() if name not in CONSTRAINTS} == {}


@pytest.mark.usefixtures("soc")
def test_every_call_is_accepted_by_the_meta_kernels_of_each_soc():
    with sites_run() as run:
        make(ON_META, "meta")
    assert {SITES[site] for site in SITES.keys() - run} == WITHOUT_META.keys()


@pytest.mark.usefixtures("numerics")
def test_every_call_is_made_on_the_emulated_device():
    with sites_run() as run:
        make(BODIES, "npu")
    assert run == SITES.keys()


def test_a_call_that_no_body_makes_would_be_found():
    with sites_run() as run:
        make([name for name in ON_META if name != "experts.gating"], "meta")
    missed = {SITES[site] for site in SITES.keys() - run}
    assert missed - WITHOUT_META.keys() == {"npu_moe_gating_top_k"}


@pytest.mark.parametrize(
    "line", ["torch.ops.npu.npu_gelu(x)", "gelu = torch_npu.npu_gelu", "from torch_npu import gelu"]
)
def test_an_operator_without_constraints_would_be_found(tmp_path, line):
    (tmp_path / "body.py").write_text(f"import torch\n{line}\n")
    (site, name), *rest = call_sites(tmp_path).items()
    assert site == ("body.py", 2)
    assert name not in CONSTRAINTS and not rest
