"""The Dockerfiles' instructions, and the folder that `COPY . .` would copy."""

from __future__ import annotations

import json
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
IMAGES = ("Dockerfile", "Dockerfile.cpu")

Instruction = tuple[str, str]


def instructions(image: str) -> list[Instruction]:
    """(keyword, rest) in order; a continued line is one instruction."""
    text = (FOLDER / image).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(keyword, rest) for keyword, rest in words]


def values(image: str, keyword: str) -> list[str]:
    return [rest for word, rest in instructions(image) if word == keyword]


def command(image: str, keyword: str) -> list[str]:
    """The words of an ENTRYPOINT, a CMD, or the CMD of a HEALTHCHECK, in their exec form."""
    (value,) = values(image, keyword)
    return json.loads(value[value.index("[") :])


def run_scripts(image: str) -> list[Path]:
    """The scripts that the RUN steps call: a step is nothing but calls of scripts of docker/."""
    steps = [call.strip() for step in values(image, "RUN") for call in step.split("&&")]
    return [FOLDER / Path(step).name for step in steps]


def copy_context(target: Path) -> Path:
    """What is tracked or new, less what .dockerignore names; so no local build output either."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in listed:
        if is_ignored(name, ignored) or not (ROOT / name).is_file():
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return target


def is_ignored(name: str, patterns: list[str]) -> bool:
    """A path or a folder above it matches; `**/` matches any folder, and none."""
    paths = [name, *map(str, Path(name).parents)]
    for pattern in patterns:
        tail = pattern.removeprefix("**/")
        if any(fnmatch(path, tail) for path in paths):
            return True
        if tail != pattern and any(fnmatch(Path(path).name, tail) for path in paths):
            return True
    return False
