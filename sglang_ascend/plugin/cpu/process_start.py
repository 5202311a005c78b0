"""Server processes that begin with SGLang imported, as copies of the one that starts them."""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

# What `python -m sglang.launch_server` and `sglang serve` are called in their own process.
_COMMANDS = ("sglang.launch_server", "sglang")


def fork_schedulers(
    launch: Callable[..., Any],
    cls: type,
    server_args: Any,
    port_args: Any,
    run_scheduler_process_func: Callable[..., Any],
    *,
    placement_group: Any = None,
) -> Any:
    """Around ``Engine._launch_scheduler_processes``."""
    arguments = server_args, port_args, run_scheduler_process_func
    return _forked(lambda: launch(cls, *arguments, placement_group=placement_group))


def fork_detokenizers(
    launch: Callable[..., Any],
    cls: type,
    server_args: Any,
    port_args: Any,
    run_detokenizer_process_func: Callable[..., Any],
) -> Any:
    """Around ``Engine._launch_detokenizer_subprocesses``."""
    return _forked(lambda: launch(cls, server_args, port_args, run_detokenizer_process_func))


def _forked(launch: Callable[[], Any]) -> Any:
    """SGLang spawns, because a copied process cannot use CUDA. On CPU each spawned one only imports
    for ten seconds what its parent has imported. A copy is safe where nothing has computed yet and
    no other thread is there (those of numpy's BLAS know of forks): in SGLang's own commands. In a
    program of somebody else they are spawned as ever.
    """
    if not _in_a_command() or threading.active_count() > 1:
        return launch()
    register_after_fork(_begin_as_if_spawned, _begin_as_if_spawned)
    method = mp.get_start_method()
    mp.set_start_method("fork", force=True)
    try:
        return launch()
    finally:
        mp.set_start_method(method, force=True)


def _in_a_command() -> bool:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return (spec.name if spec else Path(getattr(main, "__file__", "")).name) in _COMMANDS


def _begin_as_if_spawned(_: object) -> None:
    """In the new process: it has threads when it starts its own, and is not its parent."""
    mp.set_start_method("spawn", force=True)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
