"""A server process on a free loopback port; it dies with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
START_TIMEOUT_S = 300  # without a new line in the log
REPLY_TIMEOUT_S = 900
PR_SET_PDEATHSIG = 1
SERVER_PORTS = range(10000, 22000)
TRIES = 64
MAX_STARTS = 3
_LIBC = ctypes.CDLL(None)  # loaded before any fork
# A proxy of the environment is not for this machine's own address.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerProcess:
    """A running server. The constructor returns at once; always ``stop``.

    ``environment`` is added to this process's; a PYTHONPATH in it is searched first.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        program: Sequence[str] = LAUNCH,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        self._command = [*program, *arguments]
        self._environment = _environment(environment or {})
        self._num_starts = 0
        self._start()

    def _start(self) -> None:
        self._num_starts += 1
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = self._begun(["--host", "127.0.0.1", "--port", str(self.port)])

    def _begun(self, address: list[str]) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                [*self._command, *address],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        """Of the command, and of the process group of all that it starts."""
        return self._process.pid

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises RuntimeError with the log's tail if the server dies, or logs nothing for so long:
        large weights take their time, and the log tells how many are read.

        SGLang chooses ports seconds before it binds them. Where another process was faster the
        server dies, and is started again.
        """
        num_lines, deadline = 0, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if num_lines != (num_lines := self._num_lines()):
                deadline = time.monotonic() + timeout_s
            if self._process.poll() is not None:
                if self._num_starts == MAX_STARTS or not self._found_a_port_taken():
                    raise RuntimeError(f"the server died at start:\n{self.log_tail()}")
                self.stop()
                self._start()
            if self.is_healthy():
                return
            time.sleep(0.3)
        raise RuntimeError(
            f"the server has not started, and logged nothing for {timeout_s:.0f} s:\n"
            f"{self.log_tail()}"
        )

    def is_healthy(self) -> bool:
        try:
            with _OPENER.open(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    def generate(self, **body: Any) -> list[dict[str, Any]]:
        """The replies to one batched request of `/generate`. Raises OSError."""
        request = urllib.request.Request(
            f"{self.url}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _OPENER.open(request, timeout=REPLY_TIMEOUT_S) as reply:
            return json.load(reply)

    def stop(self) -> None:
        """Ends the whole process group: scheduler and detokenizer are its members."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _found_a_port_taken(self) -> bool:
        return "address already in use" in self.log().lower()

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _num_lines(self) -> int:
        """Of the log, but for those of `is_healthy`, which is asked all the time."""
        return sum("/health" not in line for line in self.log().splitlines())

    def log_tail(self, num_lines: int = 40) -> str:
        return "\n".join(line[:500] for line in deque(self.log().splitlines(), num_lines))


@contextlib.contextmanager
def starting_server(*arguments: str, **environment: str) -> Iterator[ServerProcess]:
    """One that has its log in a folder of its own; both are gone behind the block."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(arguments, Path(folder) / "server.log", environment=environment)
        try:
            yield server
        finally:
            server.stop()


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    paths = (variables.get("PYTHONPATH") for variables in (added, os.environ))
    return {**os.environ, **added, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def free_port() -> int:
    """One that nobody is given unasked until a server binds it, seconds later.

    From 32768 on (Linux's default) ports go to whoever binds port 0 or connects, the starting
    server included; SGLang draws others from 22000 to 29999. Raises OSError without a free one.
    """
    for port in random.SystemRandom().sample(SERVER_PORTS, TRIES):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"{TRIES} ports of {SERVER_PORTS.start} to {SERVER_PORTS.stop - 1} are taken")


def die_with_parent() -> None:
    """Linux kills the server with its parent, even one that a timeout ends without cleanup."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
