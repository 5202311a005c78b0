"""Every body of an operator has a caller: what SGLang loads of this package calls the operator, or
a benchmark does, and says what the body is a candidate for. Nothing else is kept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from sglang_ascend.ops.dispatch import OPS, REFERENCE, Implementation, Op, load_operators

ROOT = Path(__file__).parents[2]
# SGLang's own worker and attention serve CUDA: a body for it is a benchmark's.
# On the meta device `plan-memory` counts what the bodies of an NPU would hold.
SERVED = {"cpu", "npu", "meta"}

load_operators()
Modules = Mapping[str, ast.Module]


def modules_of(folder: Path) -> dict[str, ast.Module]:
    """By name, as imports have it."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


PACKAGE = modules_of(ROOT / "sglang_ascend")
BENCHMARKS = modules_of(ROOT / "benchmarks")


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def reachable(modules: Modules, roots: Iterable[str]) -> set[str]:
    """The roots and all that they import, of ``modules``; what lies in ops/ calls nothing else."""
    found: set[str] = set()
    waiting = [name for name in roots if name in modules]
    while waiting:
        name = waiting.pop()
        if name not in found and not name.startswith("sglang_ascend.ops"):
            found.add(name)
            waiting += imported(modules[name]) & modules.keys()
    return found


def called(modules: Modules, names: Iterable[str]) -> set[str]:
    """Operators that these modules name, as attributes of their groups or as text."""
    found: set[str] = set()
    for name in names:
        groups = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(modules[name])
            if isinstance(node, ast.ImportFrom) and node.module == "sglang_ascend.ops"
            for alias in node.names
        }
        for node in ast.walk(modules[name]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.add(f"{groups.get(node.value.id)}.{node.attr}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found & OPS.keys()


def candidates_of(tree: ast.Module) -> dict[str, str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CANDIDATES":
            return ast.literal_eval(node.value)
    return {}


CANDIDATES = {name: candidates_of(tree) for name, tree in BENCHMARKS.items()}
CALLED = called(PACKAGE, reachable(PACKAGE, [n for n in PACKAGE if ".plugin" in n]))
MEASURED = {name for of_benchmark in CANDIDATES.values() for name in of_benchmark}


def without_caller(ops: Mapping[str, Op], called: set[str], measured: set[str]) -> list[str]:
    """Operators and bodies that nobody calls where they are registered."""
    found = []
    for name, op in ops.items():
        for body in op._implementations.values():
            devices = body.devices or SERVED
            needs_benchmark = name not in called or not devices <= SERVED
            if needs_benchmark and name not in measured:
                found.append(f"{name}: {body.name}")
    return found


def test_every_body_has_a_caller():
    assert without_caller(OPS, CALLED, MEASURED) == []


@pytest.mark.parametrize("benchmark", [name for name, of in CANDIDATES.items() if of])
def test_a_benchmark_calls_its_candidates_and_says_what_they_would_replace(benchmark):
    modules = {**BENCHMARKS, **PACKAGE}
    assert CANDIDATES[benchmark].keys() <= called(modules, reachable(modules, [benchmark]))
    assert all(CANDIDATES[benchmark].values())


@pytest.fixture
def op():
    """An operator of this test only, with its reference."""
    operator = Op("test.op", lambda tensor: tensor)
    yield operator
    del OPS["test.op"]


def test_an_operator_that_nobody_calls_is_found(op):
    assert without_caller(OPS, CALLED, MEASURED) == [f"test.op: {REFERENCE}"]


def test_a_body_for_a_device_that_serves_otherwise_is_found(op):
    op.register(Implementation("kernel", lambda tensor: tensor, frozenset({"cuda"})))
    assert without_caller({"test.op": op}, {"test.op"}, set()) == ["test.op: kernel"]
    assert without_caller({"test.op": op}, {"test.op"}, {"test.op"}) == []


def test_a_call_counts_from_what_is_imported_alone(op, monkeypatch):
    sources = {
        "sglang_ascend.plugin.entry": "import sglang_ascend.step",
        "sglang_ascend.step": "from sglang_ascend.ops import test as ops\nops.op(1)",
        "sglang_ascend.training": "from sglang_ascend.ops import chain\nchain.verify_chain(1)",
    }
    modules = {name: ast.parse(source) for name, source in sources.items()}
    assert called(modules, reachable(modules, ["sglang_ascend.plugin.entry"])) == {"test.op"}
