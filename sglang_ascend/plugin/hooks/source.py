"""What a function's source says, as a hash: comments, blank lines and docstrings leave it alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from hashlib import sha256
from types import FunctionType

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def digest(node: ast.AST) -> str:
    """16 hexadecimal digits of a definition: decorators, signature and body."""
    node = ast.parse(ast.unparse(node))
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            inner.body = body[1:] or [ast.Pass()]  # pyright: ignore[reportAttributeAccessIssue]
    return sha256(ast.unparse(node).encode()).hexdigest()[:16]


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def find(tree: ast.Module, name: str) -> ast.AST | None:
    """The last definition of ``name``, or of ``Class.method``; of a name that is only imported or
    assigned, that statement. Looks into ``if`` and ``try`` as well."""
    scope: ast.AST | None = tree
    for part in name.split("."):
        defined = [node for node in statements(scope) if part in _names(node)]
        if not defined:
            return None
        definitions = [node for node in defined if isinstance(node, _DEFINITIONS)]
        scope = (definitions or defined)[-1]
    return scope


def statements(scope: ast.AST | None) -> list[ast.stmt]:
    """Of a module or a class, those under ``if``, ``try`` and ``with`` included."""
    found = []
    for block in ("body", "orelse", "finalbody"):
        for node in getattr(scope, block, []):
            found.append(node)
            if isinstance(node, ast.If | ast.Try | ast.With):
                found += statements(node)
    for handler in getattr(scope, "handlers", []):
        found += statements(handler)
    return found


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def digest_of(function: FunctionType) -> str:
    """Of a function that is loaded, as ``digest`` of its definition."""
    return digest(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0])
