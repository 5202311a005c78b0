"""Prefill and decode in two processes of one command: the decode server starts the other.

A client of SGLang sends each request to both servers; here both read the same file. The prefill
server serves until its input ends, for the decode server still asks after it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import begun
import requests

from npu_emulation.followers import end_with, own_rank
from npu_emulation.report import Report, Request
from npu_emulation.stand_ins.transfers import HOST
from sglang_ascend.bench.server import free_port

MODE, PORT = "NPU_EMULATION_MODE", "NPU_EMULATION_BOOTSTRAP_PORT"
GRACE_SECONDS = 60  # to write a report in
PREFILL, DECODE = "prefill", "decode"
ANY_RANK = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
Waves = Iterable[Sequence[Request]]
Serve = Callable[[list[str], Waves], Report]


def serve_apart(serve: Serve, arguments: list[str], waves: Waves) -> Report:
    """As `serve`, with prompts prefilled by another process; its report is in `prefill`."""
    flags, waves = [*arguments, *own_flags()], in_rooms(waves)
    if own_mode() == PREFILL:
        return serve(flags, until_input_ends(waves))
    if own_rank() != 0:
        return serve(flags, waves)
    with tempfile.TemporaryDirectory() as folder:
        prefill = PrefillServer(Path(folder) / "prefill.json")
        report = serve(flags, prefill.when_ready(waves))
        report.prefill = prefill.finish()
    return report


def own_mode() -> str:
    return os.environ.get(MODE, DECODE)


def own_flags() -> list[str]:
    """Of SGLang. What both servers must be told alike is in the environment, which they share."""
    os.environ.setdefault(PORT, str(free_port()))
    os.environ.setdefault("ASCEND_MF_STORE_URL", f"tcp://{HOST}:{free_port()}")
    os.environ["SGLANG_HOST_IP"] = HOST
    # A request that waits for its turn in an interpreted server is not lost.
    for wait in ("BOOTSTRAP", "WAITING"):
        os.environ[f"SGLANG_DISAGGREGATION_{wait}_TIMEOUT"] = "7200"
    mode = ["--disaggregation-mode", own_mode()]
    backend = ["--disaggregation-transfer-backend", "ascend"]
    return [*mode, *backend, "--disaggregation-bootstrap-port", os.environ[PORT]]


def in_rooms(waves: Waves) -> list[list[Request]]:
    numbers = iter(range(1, sys.maxsize))
    return [[replace(request, bootstrap_room=next(numbers)) for request in wave] for wave in waves]


def until_input_ends(waves: Waves) -> Iterator[Sequence[Request]]:
    """A decode server that failed ends this one's input too: then it may not finish."""
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    yield from waves
    ended.wait()


class PrefillServer:
    def __init__(self, report: Path) -> None:
        self.report = report
        stdin, self._input = os.pipe()
        self.process = begun.again(["--json", str(report)], os.environ | {MODE: PREFILL}, stdin)
        os.close(stdin)
        threading.Thread(target=end_with, args=(self.process,), daemon=True).start()

    def when_ready(self, waves: Waves) -> Iterator[Sequence[Request]]:
        while not _answers(f"http://{HOST}:{os.environ[PORT]}/route?{ANY_RANK}"):
            time.sleep(0.1)
        yield from waves

    def finish(self) -> Report:
        os.close(self._input)
        self.process.wait()
        return Report.from_json(self.report.read_text())


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).status_code == 200
    except requests.ConnectionError:
        return False
