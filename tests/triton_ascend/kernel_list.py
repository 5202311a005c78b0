"""Which Triton kernels are lowered for Ascend: the list, kernels.toml, and what the sources say."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("kernels.toml")


@dataclass(frozen=True)
class Kernel:
    """One kernel at one set of types and constants; several may share a function.

    ``arguments`` maps each run-time argument to its Triton type ("*fp32", "i32"), in the kernel's
    order; ``constants`` every other one to its value. The budgets map a target to a count; what
    they do not name is 0. ``only`` has the targets that launch it, where others launch another.
    """

    name: str
    module: str
    function: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    scalar_loops: dict[str, int] = field(default_factory=dict)
    row_loops: dict[str, int] = field(default_factory=dict)
    not_executed: str = ""
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class JitFunction:
    """What the source says of a `@triton.jit` function. ``uses``: (module, name) in its body."""

    module: str
    function: str
    parameters: tuple[str, ...]
    constexprs: frozenset[str]
    uses: frozenset[tuple[str, str]]


def listed_kernels(path: Path = LIST) -> list[Kernel]:
    return [Kernel(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["kernel"]]


def _imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name) of every `from module import name`."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


def _is_jit(decorator: ast.expr, imported: dict[str, tuple[str, str]]) -> bool:
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name == "triton.jit" or imported.get(name) == ("triton", "jit")


def jit_functions(package: Path) -> dict[tuple[str, str], JitFunction]:
    """Every `@triton.jit` function under ``package``, by (module, name)."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = _imported_names(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            if not any(_is_jit(decorator, imported) for decorator in node.decorator_list):
                continue
            parameters = [*node.args.args, *node.args.kwonlyargs]
            found[module, node.name] = JitFunction(
                module,
                node.name,
                tuple(parameter.arg for parameter in parameters),
                frozenset(
                    parameter.arg
                    for parameter in parameters
                    if parameter.annotation and "constexpr" in ast.unparse(parameter.annotation)
                ),
                frozenset(
                    imported.get(name.id, (module, name.id))
                    for statement in node.body
                    for name in ast.walk(statement)
                    if isinstance(name, ast.Name)
                ),
            )
    return found


def unlisted(
    kernels: Iterable[Kernel], functions: dict[tuple[str, str], JitFunction]
) -> set[tuple[str, str]]:
    """Jit functions that no listed kernel is, or calls: they would be lowered by nobody."""
    reached: set[tuple[str, str]] = set()
    waiting = [(kernel.module, kernel.function) for kernel in kernels]
    while waiting:
        key = waiting.pop()
        if key in functions and key not in reached:
            reached.add(key)
            waiting.extend(functions[key].uses)
    return functions.keys() - reached
