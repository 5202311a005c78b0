"""`scripts/npu_emulation.sh` makes the environment of the torch that is asked for, and keeps it.

pip is replaced by a script that records its calls; the real installation is what CI and the tests
before a release show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CUDA_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_nvshmem.so")
VERSION = "__version__ = '2.10.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"

FAKE_PYTHON = """#!/bin/sh
case "$2 $3" in
"pip --version"|"npu_emulation --check") ;;
"pip install") echo "${PIP_CONSTRAINT##*/} $*" >>"$CALLS" ;;
*) echo "$*" ;;
esac
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """What the script reads, and an environment with a CUDA build whose pip records its calls."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    torch = installed_torch(tmp_path)
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(VERSION)
    for name in (*CUDA_LIBRARIES, "libtorch_cpu.so"):
        (torch / "lib" / name).touch()
    return tmp_path


def installed_torch(tree: Path) -> Path:
    return tree / "venv" / "lib" / "python3.11" / "site-packages" / "torch"


def run(tree: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """The script's process on `venv`, and the pip calls that it made."""
    calls = tree / "calls.txt"
    calls.write_text("")
    process = subprocess.run(
        ["bash", "scripts/npu_emulation.sh", "venv", *arguments],
        cwd=tree,
        env=os.environ | {"CALLS": str(calls)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return process, calls.read_text().splitlines()


def test_the_pinned_torch_is_left_as_it_is(tree):
    process, calls = run(tree, "--cann", "9.0.0", "python", "-V")
    assert process.stdout.splitlines()[-1] == "-m npu_emulation --cann 9.0.0 python -V"
    assert len(calls) == 3
    assert not any("npu-torch" in call for call in calls)
    assert (installed_torch(tree) / "version.py").read_text() == VERSION


def test_torch_2_10_replaces_it_free_of_its_constraint_and_becomes_as_the_cpu_build(tree):
    process, calls = run(tree, "--torch", "2.10", "--cann", "9.0.0", "python", "-V")
    assert process.stdout.splitlines()[-1] == "-m npu_emulation --cann 9.0.0 python -V"
    assert len(calls) == 4
    assert calls[2].startswith(" -m pip install --quiet --no-compile --no-deps --requirement ")
    assert calls[2].endswith("requirements/npu-torch-2.10.txt")
    assert all(call.startswith("constraints-cpu.txt ") for call in (*calls[:2], calls[3]))
    left = {path.name for path in (installed_torch(tree) / "lib").iterdir()}
    assert left == {"libtorch_cpu.so"}
    said = (installed_torch(tree) / "version.py").read_text()
    assert said == VERSION.replace("+cu128", "+cpu").replace("'12.8'", "None")


def test_an_environment_keeps_its_torch_until_another_is_asked_for(tree):
    run(tree, "--torch", "2.10", "python", "-V")
    assert run(tree, "python", "-V")[1] == []
    assert len(run(tree, "--torch", "2.13", "python", "-V")[1]) == 3
    assert run(tree, "python", "-V")[1] == []


def test_another_torch_is_refused_in_one_sentence(tree):
    process, calls = run(tree, "--torch", "2.9", "python", "-V")
    assert process.returncode == 1 and calls == []
    assert process.stderr == "npu_emulation: --torch takes 2.10 or 2.13, not 2.9.\n"
