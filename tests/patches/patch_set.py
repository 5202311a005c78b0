"""The patches, their manifest, and how the tests apply them to copies of the installed files."""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "patches" / "sglang-0.5.23"
ROWS = tomllib.loads((FOLDER / "manifest.toml").read_text(encoding="utf-8"))["patch"]
BY_FILE = {row["file"]: row for row in ROWS}


def site_packages() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin, "the pinned SGLang is not installed"
    return Path(spec.origin).parents[1]


def in_wheel(path: str) -> str:
    return path.removeprefix("python/")


def copy_targets(row: dict, folder: Path) -> None:
    for target in row["targets"]:
        copy = folder / in_wheel(target["path"])
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site_packages() / in_wheel(target["path"]), copy)


def hash_problems(row: dict, folder: Path) -> list[str]:
    return [
        f"{target['path']} has another hash: write the patch anew for this SGLang"
        for target in row["targets"]
        if hashlib.sha256((folder / in_wheel(target["path"])).read_bytes()).hexdigest()
        != target["sha256"]
    ]


def apply(patch: Path, folder: Path) -> str:
    """Applies in place. Returns git's complaint, empty when there is none."""
    command = ["git", "apply", "-p2", "--verbose", str(patch)]
    # In a folder inside a repository git would ignore what it does not track there.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr


def patched_files(row: dict, folder: Path) -> list[Path]:
    copy_targets(row, folder)
    assert apply(FOLDER / row["file"], folder) == ""
    return [folder / in_wheel(target["path"]) for target in row["targets"]]


def cut_out(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """The one function or class `name` of `source`, without its decorators, in `namespace`.

    A dot leads into a class, for a name that several of them have.
    """
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        (node,) = (
            inner
            for inner in ast.walk(node)
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and inner.name == part
        )
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    node.decorator_list.clear()
    flags = __future__.annotations.compiler_flag
    module = ast.Module([node], type_ignores=[])
    exec(compile(module, name, "exec", flags=flags, dont_inherit=True), namespace)
    return namespace[node.name]
