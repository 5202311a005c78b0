"""A server process for a benchmark: started on a free loopback port, killed with its group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

START_TIMEOUT_S = 300


@dataclass(frozen=True)
class Server:
    url: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def launch_server(model_folder: Path, *flags: str) -> Iterator[Server]:
    """``python -m sglang.launch_server`` on loopback; raises with the log's tail if it dies."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            server = Server(f"http://127.0.0.1:{port}")
            _wait_until_ready(server, process, log)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(server: Server, process: subprocess.Popen, log) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{server.url}/health_generate", timeout=30).ok:
                return
        except requests.RequestException:
            time.sleep(0.5)
    log.seek(0)
    tail = "".join(log.readlines()[-30:])
    raise RuntimeError(f"the server did not start within {START_TIMEOUT_S} s:\n{tail}")
