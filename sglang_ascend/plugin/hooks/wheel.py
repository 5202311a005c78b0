"""The source of an SGLang wheel, read from the archive: nothing is installed or imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sglang_ascend.plugin.hooks.source import find, statements

_PACKAGE = "sglang"
_MAX_REEXPORTS = 5


@dataclass(frozen=True)
class Definition:
    path: str  # in the wheel
    name: str  # of the function, class or constant in it
    node: ast.AST


def _module(path: str, node: ast.ImportFrom) -> str:
    """The absolute name of what a module at `path` imports from."""
    if not node.level:
        return node.module or ""
    package = path.removesuffix(".py").removesuffix("/__init__").split("/")
    keep = len(package) - node.level + path.endswith("/__init__.py")
    return ".".join([*package[:keep], *([node.module] if node.module else [])])


class Wheel:
    """Of one version; a name is dotted and absolute, as one would import it."""

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)
        self._trees: dict[str, ast.Module] = {}

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(
            path
            for path in self.archive.namelist()
            if path.startswith(f"{_PACKAGE}/") and path.endswith(".py")
        )

    def text(self, path: str) -> str:
        return self.archive.read(path).decode()

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(self.text(path))
        return self._trees[path]

    def split(self, name: str) -> tuple[str, str] | None:
        """(path of the module, what is left of the name), of the longest module that exists."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            stem = "/".join(parts[:end])
            for path in (f"{stem}.py", f"{stem}/__init__.py"):
                if path in self.paths:
                    return path, ".".join(parts[end:])
        return None

    def definition(self, name: str, depth: int = 0) -> Definition | None:
        """Where a name is defined, through re-exports; a module is its own definition."""
        place = self.split(name)
        if place is None or depth > _MAX_REEXPORTS:
            return None
        path, rest = place
        if not rest:
            return Definition(path, "", self.tree(path))
        first, _, member = rest.partition(".")
        origin = self.imported_from(path, first)
        if origin is not None:
            return self.definition(f"{origin}.{member}" if member else origin, depth + 1)
        node = find(self.tree(path), rest)
        if node is not None:
            return Definition(path, rest, node)
        every = (self.definition(f"{module}.{rest}", depth + 1) for module in self._starred(path))
        return next(filter(None, every), None)

    def _starred(self, path: str) -> list[str]:
        """The modules of SGLang of which a module imports everything, the last one first."""
        imports = [n for n in statements(self.tree(path)) if isinstance(n, ast.ImportFrom)]
        modules = [_module(path, n) for n in reversed(imports) if n.names[0].name == "*"]
        return [module for module in modules if module.split(".")[0] == _PACKAGE]

    def imported_from(self, path: str, name: str) -> str | None:
        """The absolute name behind ``name`` in a module that imports it from SGLang."""
        node = find(self.tree(path), name)
        if not isinstance(node, ast.ImportFrom):
            return None
        module = _module(path, node)
        (alias,) = [a for a in node.names if (a.asname or a.name) == name]
        return f"{module}.{alias.name}" if module.split(".")[0] == _PACKAGE else None

    def member(self, cls: str, name: str, depth: int = 0) -> str | None:
        """The dotted name of a class's member, which a base class may define."""
        found = self.definition(cls)
        if found is None or not isinstance(found.node, ast.ClassDef) or depth > _MAX_REEXPORTS:
            return None
        module = found.path.removesuffix(".py").replace("/", ".")
        if find(ast.Module(found.node.body, []), name) is not None:
            return f"{module}.{found.name}.{name}"
        for base in found.node.bases:
            owner = self.member(f"{module}.{ast.unparse(base)}", name, depth + 1)
            if owner is not None:
                return owner
        return None

    def elsewhere(self, name: str) -> Iterator[Definition]:
        """Definitions of ``name`` (of a function, or Class.method) in any module."""
        last = name.rpartition(".")[2]
        for path in sorted(self.paths):
            text = self.text(path)
            if f"def {last}(" in text or f"class {last}" in text:
                node = find(self.tree(path), name)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield Definition(path, name, node)
