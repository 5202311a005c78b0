"""A server whose port another process takes first is started again, and only then."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest

from sglang_ascend.bench import server as server_module
from sglang_ascend.bench.server import MAX_STARTS, ServerProcess

# Dies with what SGLang prints, as often as its first argument says, then answers /health.
SERVER = """
import http.server, pathlib, sys
deaths, error, starts = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
with starts.open("a") as file:
    file.write("started\\n")
if len(starts.read_text().split()) <= deaths:
    sys.exit(error)

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

host, port = sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer((host, port), Healthy).serve_forever()
"""
TAKEN = "port: 24722, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"


def started(deaths: int, error: str, folder: Path) -> tuple[ServerProcess, Path]:
    starts = folder / "starts"
    program = (sys.executable, "-c", SERVER)
    return ServerProcess([str(deaths), error, str(starts)], folder / "log", program), starts


def test_a_server_that_found_its_port_taken_is_started_again(tmp_path: Path) -> None:
    server, starts = started(MAX_STARTS - 1, TAKEN, tmp_path)
    first_port = server.port
    try:
        server.wait_until_ready()
        assert server.is_healthy() and server.port != first_port
        assert server.url.endswith(f":{server.port}")
    finally:
        server.stop()
    assert len(starts.read_text().split()) == MAX_STARTS


@pytest.mark.parametrize(
    ("deaths", "error", "expected"), [(1, "no memory", 1), (9, TAKEN, MAX_STARTS)]
)
def test_another_death_and_one_too_many_are_raised(
    deaths: int, error: str, expected: int, tmp_path: Path
) -> None:
    server, starts = started(deaths, error, tmp_path)
    try:
        with pytest.raises(RuntimeError, match=error):
            server.wait_until_ready()
    finally:
        server.stop()
    assert len(starts.read_text().split()) == expected


@pytest.mark.parametrize(
    ("line", "starts"),
    [("Loading safetensors", True), ('"GET /health HTTP/1.1" 503', False), ("", False)],
)
def test_a_server_has_the_time_that_its_weights_take_while_it_tells_of_them(
    line: str, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready when ten times as long as the limit is over, by a clock of this test."""
    clock, program = count(step=50), (sys.executable, "-c", "import time; time.sleep(600)")
    server = ServerProcess([], tmp_path / "log", program)
    log = ["begins"]
    monkeypatch.setattr(server_module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(server_module.time, "sleep", lambda seconds: log.append(line))
    monkeypatch.setattr(server, "log", lambda: "\n".join(filter(None, log)))
    monkeypatch.setattr(server, "is_healthy", lambda: next(clock) > 3000)
    try:
        if starts:
            server.wait_until_ready(300)
        else:
            with pytest.raises(RuntimeError, match="logged nothing for 300 s:\nbegins"):
                server.wait_until_ready(300)
    finally:
        monkeypatch.undo()
        server.stop()
