"""Files that others find whole: the old one or the new one; folders that one command writes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any


def part_of(path: Path) -> Path:
    """What ``replaced`` writes first, and who is killed amid it leaves."""
    return path.with_name(f"{path.name}.part")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The file beside ``path`` that the block writes; behind the block it takes ``path``'s place.

    Who is killed amid the block, or runs out of disk, leaves the old file, and so does a machine
    that stops: the new one is on the disk before it has the name. Of one writer at a time.
    """
    part = part_of(path)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """To read, with a newline at its end; ``replaced``."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    with replaced(path) as part:
        part.write_text(text + "\n", encoding="utf-8")


@contextmanager
def alone_in(folder: Path, name: str = "lock", option: str = "--out") -> Iterator[None]:
    """Keeps a second command out of what `name` stands for in `folder`, which is made; the kernel
    lets go of it when this process ends. `option` is what the second command would change.

    Raises:
        ValueError: another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another command is at work in {folder}: wait for it, or name another {option}."
            ) from None
        yield


@contextmanager
def new_folder(out: Path, option: str = "--out") -> Iterator[Path]:
    """The empty folder that the block fills; behind the block it is `out`, which is not there yet.

    What a killed process left of it is deleted by the next. `option` is as in `alone_in`.

    Raises:
        ValueError: another process is making it.
    """
    work = out.with_name(f".{out.name}.unfinished")
    with alone_in(work, option=option):
        made = work / out.name
        try:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            yield made
            made.rename(out)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def refuse_unwritable(path: Path, option: str) -> None:
    """Before hours of work whose result `option` has written to `path`.

    Raises:
        ValueError: no file can be written there.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file in it.")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder: {option} needs one that exists.")
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written ({error.strerror}): name another place."
        ) from None
