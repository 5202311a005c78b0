"""Processes begin as copies in SGLang's own commands only, and spawn their own children."""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest


def command(name: str | None, file: str = "/usr/bin/program.py") -> ModuleType:
    main = ModuleType("__main__")
    main.__spec__ = SimpleNamespace(name=name) if name else None
    main.__file__ = file
    return main


def report(connection) -> None:
    connection.send((mp.get_start_method(), signal.getsignal(signal.SIGQUIT)))


def start_a_process() -> tuple[str, tuple[str, object]]:
    """How the child was started, and what it finds."""
    reader, writer = mp.Pipe(duplex=False)
    child = mp.Process(target=report, args=(writer,))
    child.start()
    child.join()
    return mp.get_start_method(), reader.recv()


@pytest.fixture
def spawning(loaded_plugins, monkeypatch):
    """As SGLang leaves it before it starts its processes; pytest's own threads do not count."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    method, handler = mp.get_start_method(), signal.getsignal(signal.SIGQUIT)
    mp.set_start_method("spawn", force=True)
    signal.signal(signal.SIGQUIT, lambda number, frame: None)
    yield
    mp.set_start_method(method, force=True)
    signal.signal(signal.SIGQUIT, handler)


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (command("sglang.launch_server"), "fork"),
        (command(None, "/venv/bin/sglang"), "fork"),
        (command("pytest.__main__"), "spawn"),
        (command("myapp.sglang"), "spawn"),
        (command(None), "spawn"),
    ],
    ids=["launch_server", "sglang serve", "pytest", "an application", "a script"],
)
def test_only_sglangs_commands_fork(spawning, monkeypatch, main, expected):
    from sglang_ascend.plugin.cpu.process_start import _forked

    monkeypatch.setitem(sys.modules, "__main__", main)
    if expected == "spawn":  # a spawned child would look for this test's __main__
        assert _forked(mp.get_start_method) == "spawn"
        return
    method, (method_of_child, handler_of_child) = _forked(start_a_process)
    assert (method, method_of_child) == ("fork", "spawn")
    assert handler_of_child == signal.SIG_DFL
    assert mp.get_start_method() == "spawn"


def test_a_process_with_threads_spawns(spawning, monkeypatch):
    from sglang_ascend.plugin.cpu.process_start import _forked

    monkeypatch.setitem(sys.modules, "__main__", command("sglang.launch_server"))
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert _forked(mp.get_start_method) == "spawn"


def test_the_start_method_is_restored_when_a_start_fails(spawning, monkeypatch):
    from sglang_ascend.plugin.cpu.process_start import _forked

    monkeypatch.setitem(sys.modules, "__main__", command("sglang.launch_server"))

    def fail() -> None:
        raise RuntimeError("no port")

    with pytest.raises(RuntimeError, match="no port"):
        _forked(fail)
    assert mp.get_start_method() == "spawn"
