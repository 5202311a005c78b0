"""The step timeline as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open:
the Trace Event Format's JSON array, complete after every step, however the process ends.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from sglang_ascend.speculative.timeline import PHASES, StepTimes

logger = logging.getLogger(__name__)

# About 100,000 steps.
MAX_BYTES = 64 * 2**20
CLOSING = b"\n]\n"


class TraceFile:
    """``speculative-steps-<time>-<pid>.json`` in ``folder``, of this process and thread.

    A step is an event "step" with one nested event for each phase, in whole microseconds of the
    host's monotonic clock, which all processes of a machine share. Nothing is written once the
    file has ``max_bytes``. OSError if the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, process_name: str, max_bytes: int = MAX_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid, self._tid = os.getpid(), threading.get_native_id()
        started = time.strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"speculative-steps-{started}-{self._pid}.json"
        self._file = self.path.open("xb", buffering=0)
        self._max_bytes = max_bytes
        self._end = 0  # of the events; the closing bracket comes after it
        names = {"process_name": process_name, "thread_name": "speculative steps"}
        events = [self._event("M", name, args={"name": text}) for name, text in names.items()]
        self._append("[\n", events)

    def write(self, step: StepTimes) -> None:
        if self._file.closed:
            return
        moments = [round(moment * 1e6) for moment in step.moments]
        whole = self._span("step", moments[0], moments[-1], args={"batch_size": step.batch_size})
        phases = map(self._span, PHASES, moments[:-1], moments[1:])
        self._append(",\n", [whole, *phases])

    def _span(self, name: str, start: int, end: int, **fields: Any) -> dict[str, Any]:
        return self._event("X", name, ts=start, dur=end - start, **fields)

    def _event(self, ph: str, name: str, **fields: Any) -> dict[str, Any]:
        return {"ph": ph, "name": name, "pid": self._pid, "tid": self._tid, **fields}

    def _append(self, before: str, events: list[dict[str, Any]]) -> None:
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        text = (before + lines).encode()
        # With the bracket, in one write over the last one: a kill finds it before or after.
        size = self._end + len(text) + len(CLOSING)
        if size > self._max_bytes:
            self._close(f"the trace {self.path} is full and ends here")
            return
        try:
            os.pwrite(self._file.fileno(), text + CLOSING, self._end)
        except OSError as error:
            self._close(f"the trace {self.path} ends here ({error.strerror})")
            return
        self._end += len(text)

    def _close(self, reason: str) -> None:
        logger.warning("%s; serving goes on.", reason)
        self._file.close()
