"""A begun program is `python -m MODULE ARGUMENTS`: its arguments, environment, folder, streams,
exit status and session are its own. Of SGLang, torch_npu and the plugin nothing is imported before,
but in a server's: SGLang is, and has loaded no plugin.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from begun import Program, Template, may_have_sglang, server_template, template

PROGRAM = """
import json, os, sys
ours = ("sglang.", "torch_npu.", "sglang_ascend.plugin.")
print(json.dumps({
    "name": __name__,
    "arguments": sys.argv[1:],
    "command": sys.orig_argv[1:],
    "environ": sorted(set(os.environ) - {"LC_CTYPE", "BEGUN_TEMPLATE"}),
    "leads_its_session": os.getsid(0) == os.getpid(),
    "has_torch": "torch" in sys.modules,
    "imported": [name for name in sys.modules if f"{name}.".startswith(ours)],
    "input": sys.stdin.read(),
}))
print("an error", file=sys.stderr)
sys.exit(3)
"""

SERVER = """
import sys
from sglang.srt import plugins
assert "sglang.srt.entrypoints.http_server" in sys.modules
assert not plugins._plugins_loaded
assert "sglang_ascend.plugin.mtp.algorithm" not in sys.modules
"""

# What a thread and a registered function say last, without a line's end, and a folder that is gone.
ENDS = """
import atexit, pathlib, sys, tempfile, threading, time
atexit.register(print, "registered", end="")
threading.Thread(target=lambda: time.sleep(0.1) or print("thread", end=" ")).start()
temporary = tempfile.TemporaryDirectory()
pathlib.Path("temporary").write_text(temporary.name)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs lie, and this process is."""
    (tmp_path / "said.py").write_text(PROGRAM)
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin(folder: Path, *command: str, **environ: str) -> Program:
    return begin_of(template(), folder, *command, **environ)


def begin_of(of: Template, folder: Path, *command: str, **environ: str) -> Program:
    (folder / "input").write_text("asked")
    with (
        (folder / "input").open() as given,
        (folder / "output").open("w") as output,
        (folder / "errors").open("w") as errors,
    ):
        streams = (stream.fileno() for stream in (given, output, errors))
        return of.begin(command, {"ITS_OWN": "1", **environ}, *streams)


def test_it_runs_as_python_runs_a_module(folder: Path) -> None:
    program = begin(folder, "said", "--flag", "value")
    assert program.wait() == program.wait() == program.poll() == 3
    assert (folder / "errors").read_text() == "an error\n"
    assert json.loads((folder / "output").read_text()) == {
        "name": "__main__",
        "arguments": ["--flag", "value"],
        "command": ["-m", "said", "--flag", "value"],
        "environ": ["ITS_OWN"],
        "leads_its_session": True,
        "has_torch": True,
        "imported": [],
        "input": "asked",
    }


@pytest.mark.sglang
def test_a_server_begins_with_sglang_and_without_the_plugin(folder: Path) -> None:
    (folder / "server.py").write_text(SERVER)
    assert begin_of(server_template(), folder, "server").wait() == 0
    assert begin(folder, "server").wait() == 1, "the control"
    assert may_have_sglang(os.environ | {"SGLANG_ASCEND_HOOKS": "1"})
    assert not may_have_sglang(os.environ | {"SGLANG_TEST_RETRACT": "1"})


@pytest.mark.parametrize("has_a_path_of_its_own", [True, False])
def test_its_path_and_the_sitecustomize_on_it_are_its_own(
    folder: Path, has_a_path_of_its_own: bool
) -> None:
    (folder / "parts").mkdir()
    (folder / "parts" / "sitecustomize.py").write_text("import part; part.is_begun = True")
    (folder / "parts" / "part.py").write_text("is_begun = False")
    (folder / "asks.py").write_text("import part; print(part.is_begun, part.__file__)")
    environ = {"PYTHONPATH": str(folder / "parts")} if has_a_path_of_its_own else {}
    status = begin(folder, "asks", **environ).wait()
    said = (folder / "output").read_text()
    if has_a_path_of_its_own:
        assert (status, said) == (0, f"True {folder / 'parts' / 'part.py'}\n")
    else:
        assert "No module named 'part'" in (folder / "errors").read_text()


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('words')", 1, "words\n"),
        ("raise ValueError('words')", 1, "ValueError: words\n"),
    ],
)
def test_it_ends_as_python_ends(folder: Path, last: str, status: int, said: str) -> None:
    (folder / "ends.py").write_text(ENDS + last)
    assert begin(folder, "ends").wait() == status
    assert (folder / "output").read_text() == "thread registered"
    assert (folder / "errors").read_text().endswith(said)
    assert not Path((folder / "temporary").read_text()).exists()


def test_a_killed_one_is_waited_for_and_has_the_signals_status(folder: Path) -> None:
    program = begin(folder, "sleeps")
    assert program.poll() is None
    with pytest.raises(TimeoutError):
        program.wait(0.1)
    os.killpg(program.pid, signal.SIGKILL)
    assert program.wait() == program.poll() == -signal.SIGKILL
    assert not Path(f"/proc/{program.pid}").exists()
