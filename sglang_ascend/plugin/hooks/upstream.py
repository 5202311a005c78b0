"""python -m sglang_ascend.plugin.hooks.upstream VERSION [--from VERSION] [--json]

What of SGLang this plugin depends on has moved, changed or vanished between two releases. Their
wheels are downloaded and read as archives; nothing of them is installed or imported. Exits with 1
if anything has changed. A version may also be the path of a wheel.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_ascend.plugin.compat import SUPPORTED_SGLANG
from sglang_ascend.plugin.hooks.source import digest
from sglang_ascend.plugin.hooks.uses import Use, mentioned, uses
from sglang_ascend.plugin.hooks.wheel import Definition, Wheel

PATCHES = Path(__file__).parents[3] / "patches"


@dataclass(frozen=True)
class Change:
    kind: str
    name: str
    what: str
    used_by: str


def changes(
    old: Wheel, new: Wheel, used: Iterable[Use], members: frozenset[str] = frozenset()
) -> list[Change]:
    """``members``: of an imported class only these are compared, of any other name all of it."""
    found = []
    for use in used:
        what = _change(old, new, use, members)
        if what:
            found.append(Change(use.kind, use.name, what, use.used_by))
    return found


def _change(old: Wheel, new: Wheel, use: Use, members: frozenset[str]) -> str:
    before, after = old.definition(use.name), new.definition(use.name)
    if before is None:
        return "not in the old release"
    if after is None:
        return _whereabouts(new, before)
    if before.path != after.path:
        return f"moved to {after.path}"
    if isinstance(before.node, ast.Module):
        return "" if use.lines in new.text(after.path) else "changed"
    if isinstance(before.node, ast.ClassDef) and isinstance(after.node, ast.ClassDef):
        differing = _differing_members(before.node, after.node, members)
        return f"changed: {', '.join(differing)}" if differing else ""
    return "" if digest(before.node) == digest(after.node) else "changed"


def _whereabouts(new: Wheel, before: Definition) -> str:
    places = list(new.elsewhere(before.name)) if before.name else []
    if len(places) != 1:
        return "vanished"
    same = digest(places[0].node) == digest(before.node)
    return f"moved to {places[0].path}" + ("" if same else ", changed")


def _differing_members(before: ast.ClassDef, after: ast.ClassDef, members: frozenset[str]) -> list:
    """Of public methods the signature counts, of private ones and of fields everything."""
    ours, theirs = (_members(node) for node in (before, after))
    return sorted(
        name for name, source in ours.items() if name in members and theirs.get(name) != source
    )


def _members(cls: ast.ClassDef) -> dict[str, str]:
    found = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            whole = node.name.startswith("_") and not node.name.startswith("__")
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            signature = f"{decorators} {ast.unparse(node.args)}"
            found[node.name] = digest(node) if whole else signature
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = ast.unparse(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.unparse(node)
    return found


def download(version: str, folder: Path) -> Path:
    """The wheel of a release, or the wheel itself if that is what is named."""
    if version.endswith(".whl"):
        return Path(version)
    target = folder / version
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(target), f"sglang=={version}"]
    if subprocess.run(command).returncode:
        raise SystemExit(f"sglang=={version} cannot be downloaded: name a release that exists.")
    (wheel,) = target.glob("*.whl")
    return wheel


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="the release to look at")
    parser.add_argument("--from", dest="old", default=SUPPORTED_SGLANG, help="%(default)s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    patches = sorted(PATCHES.glob(f"sglang-{SUPPORTED_SGLANG}/*.patch"))
    with tempfile.TemporaryDirectory() as folder:
        old, new = (Wheel(download(name, Path(folder))) for name in (options.old, options.version))
        used = uses(old, patches)
        found = changes(old, new, used, mentioned())
    lines = [f"{c.kind:<9} {c.name}  {c.what}  ({c.used_by})" for c in found]
    lines.append(f"{len(found)} of {len(used)} names changed since {options.old}.")
    as_json = json.dumps([asdict(change) for change in found], indent=1)
    sys.stdout.write(as_json if options.json else "\n".join(lines))
    sys.stdout.write("\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
