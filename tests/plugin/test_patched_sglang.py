"""With every patch applied, SGLang serves MTP without any of our hooks and workarounds.

That is what the patches are for; the same bare plugin on the unpatched wheel must fail.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("patched_engine.py")
PATCHES = sorted((Path(__file__).parents[2] / "patches" / "sglang-0.5.23").glob("*.patch"))


def generate(model: Path, kind: str, python_path: Path | None = None) -> list[list[int]] | str:
    """The generated tokens, or the last line of stderr when the engine did not start."""
    environ = dict(os.environ)
    if python_path is not None:
        folders = (str(python_path), environ.get("PYTHONPATH"))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, str(SCRIPT), str(model), kind]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    if done.returncode != 0:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def patched_sglang(tmp_path_factory) -> Path:
    """A copy of the installed package, by links, in which every patched file is a real one."""
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    installed = Path(spec.origin).parent
    folder = tmp_path_factory.mktemp("patched")
    for path in installed.rglob("*"):
        if path.is_file():  # byte code too, which stays valid but for the patched files
            link = folder / "sglang" / path.relative_to(installed)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    for patch in PATCHES:
        for line in patch.read_text(encoding="utf-8").splitlines():
            if line.startswith("+++ b/python/"):
                link = folder / line.removeprefix("+++ b/python/")
                content = link.read_bytes()
                link.unlink()
                link.write_bytes(content)
        subprocess.run(["git", "apply", "-p2", str(patch)], cwd=folder, check=True)
    return folder


def test_patched_sglang_needs_none_of_our_hooks(tiny_mimo, patched_sglang):
    bare = generate(tiny_mimo, "bare", patched_sglang)
    assert bare == generate(tiny_mimo, "ours")
    assert [len(tokens) for tokens in bare] == [24, 24, 24]


def test_unpatched_sglang_does_need_them(tiny_mimo):
    assert "'torch.device' object has no attribute 'split'" in generate(tiny_mimo, "bare")
