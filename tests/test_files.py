"""A file is the old one or the new one, whatever stops its writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ascend.files import alone_in, new_folder, refuse_unwritable, replaced, write_json

KILLED = """
import os, signal, sys
from pathlib import Path
from sglang_ascend.files import replaced
with replaced(Path(sys.argv[1])) as part:
    part.write_text("half of the new o")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state.json"
    path.write_text("old")
    return path


def test_a_new_file_is_on_the_disk_before_it_has_the_name(path, monkeypatch):
    synchronised = []

    def fsync(number: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{number}"))
        synchronised.append((file.read_text(), path.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replaced(path) as part:
        part.write_text("new")
    assert synchronised == [("new", "old")]
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_gets_its_room_back(path):
    with pytest.raises(OSError, match="No space"), replaced(path) as part:
        part.write_text("half of the new o")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_writes_it(path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    write_json(path, {"é": 1})
    assert path.read_text(encoding="utf-8") == '{\n  "é": 1\n}\n'
    assert list(path.parent.iterdir()) == [path]


def test_one_command_is_at_work_in_a_folder_and_another_by_another_name(tmp_path):
    folder, seed = tmp_path / "new", ("lock-001", "--seed")
    for _ in range(2):
        with alone_in(folder), alone_in(folder, *seed):
            second = alone_in(folder, *seed)
            sentence = f"at work in {folder}: wait for it, or name another --seed"
            with pytest.raises(ValueError, match=sentence):
                second.__enter__()


FOLDER_KILLED = """
import os, signal, sys
from pathlib import Path
from sglang_ascend.files import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("of what is new")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_new_folder_is_whole_and_a_killed_one_leaves_nothing_once_it_is_made(tmp_path):
    out = tmp_path / "parent" / "out"
    killed = subprocess.run([sys.executable, "-c", FOLDER_KILLED, str(out)])
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in out.parent.iterdir()] == [".out.unfinished"]
    with new_folder(out) as folder:
        assert not any(folder.iterdir()) and not out.exists()
        (folder / "file").write_text("new")
        with pytest.raises(ValueError, match=r"at work in .*: wait for it, or name another OUT"):
            new_folder(out, "OUT").__enter__()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["file"]


def test_a_new_folder_that_failed_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No space"), new_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("of what is new")
        raise OSError(28, "No space left on device")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/gone/report.json", "/gone is no folder: --out needs one that exists"),
        ("/proc", "--out /proc is a folder: name a file in it"),
        ("/proc/report.json", "--out /proc/report.json cannot be written"),  # by root too
    ],
)
def test_a_place_that_takes_no_file_is_refused_before_there_is_one(path, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        refuse_unwritable(Path(path), "--out")
    refuse_unwritable(tmp_path / "report.json", "--out")  # the control
    assert not any(tmp_path.iterdir())
