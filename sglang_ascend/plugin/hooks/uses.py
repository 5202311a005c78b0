"""Which names of SGLang this plugin depends on: its hooks, its patches, imports and overrides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_ascend.plugin.hooks.ledger import HOOKS
from sglang_ascend.plugin.hooks.source import statements
from sglang_ascend.plugin.hooks.wheel import Wheel

PLUGIN = Path(__file__).parents[1]


@dataclass(frozen=True, order=True)
class Use:
    kind: Literal["hook", "patch", "override", "import"]
    name: str
    used_by: str
    # Of a patch that changes lines of a module between its definitions: those that it must find.
    lines: str = ""


def uses(wheel: Wheel, patches: Iterable[Path]) -> list[Use]:
    """All of them, each kind and name once. ``wheel``: the version that the plugin adapts."""
    found: dict[tuple[str, str, str], Use] = {}
    for use in (*hook_uses(), *patch_uses(wheel, patches), *code_uses(wheel, PLUGIN)):
        found.setdefault((use.kind, use.name, use.lines), use)
    return sorted(found.values())


def hook_uses() -> Iterator[Use]:
    for hook in HOOKS:
        for name, _ in hook.definitions:
            yield Use("hook", name, hook.replacement)


def patch_uses(wheel: Wheel, patches: Iterable[Path]) -> Iterator[Use]:
    """The innermost definition around each change; of one between definitions, its lines."""
    for patch in patches:
        path = ""
        for section in re.split(r"^(?=--- a/|@@ )", patch.read_text(encoding="utf-8"), flags=re.M):
            first, *lines = section.splitlines() or [""]
            if first.startswith("--- a/"):
                path = first.removeprefix("--- a/").removeprefix("python/")
            elif first.startswith("@@ "):
                old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in "- ")
                before, found, _ = wheel.text(path).partition(old)
                name = ""
                if found:
                    changed = _changed_lines(before.count("\n") + 1, lines)
                    name = _enclosing(wheel.tree(path), changed)
                module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                if name:
                    yield Use("patch", f"{module}.{name}", patch.name)
                else:
                    yield Use("patch", module, patch.name, old)


def _changed_lines(number: int, lines: list[str]) -> list[int]:
    """Of the old file: those that go, and those before which something is added."""
    changed = []
    for line in lines:
        if line[:1] in ("-", "+"):
            changed.append(number)
        if line[:1] != "+":
            number += 1
    return changed


def _enclosing(scope: ast.AST, lines: list[int]) -> str:
    for node in statements(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.lineno <= lines[0] and lines[-1] <= (node.end_lineno or node.lineno) + 1:
            inner = _enclosing(node, lines) if isinstance(node, ast.ClassDef) else ""
            return f"{node.name}.{inner}" if inner else node.name
    return ""


def code_uses(wheel: Wheel, plugin: Path) -> Iterator[Use]:
    for path in sorted(plugin.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = imports(tree)
        used_by = path.relative_to(plugin.parent).as_posix()
        for name in imported.values():
            yield Use("import", name, used_by)
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            bases = [
                imported[name] for base in cls.bases if (name := ast.unparse(base)) in imported
            ]
            for method in [node for node in cls.body if isinstance(node, ast.FunctionDef)]:
                for base in bases:
                    overridden = wheel.member(base, method.name)
                    if overridden is not None:
                        yield Use("override", overridden, used_by)


def imports(tree: ast.Module) -> dict[str, str]:
    """What a module calls a name of SGLang -> the absolute name."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang"
        for alias in node.names
    }


def mentioned() -> frozenset[str]:
    """Every attribute and keyword that the plugin writes: what it may ask of a class."""
    names = set()
    for path in PLUGIN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                names.add(node.arg)
    return frozenset(names)
