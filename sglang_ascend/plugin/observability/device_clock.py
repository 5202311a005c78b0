"""The clock of a device that works behind the host, by its events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch


class DeviceClock:
    """The time of a device: a mark is an event of its stream, which happens once the work before it
    is done. Marks are read in the order in which they were made."""

    def __init__(self, device: torch.device | str) -> None:
        self._make_event = partial(torch.get_device_module(device).Event, enable_timing=True)
        # Events say how far they are apart, in float32: each is read by the last one before it.
        self._last: Any = None
        self._seconds = 0.0

    def mark(self) -> Any:
        event = self._make_event()
        event.record()
        if self._last is None:
            self._last, self._seconds = event, time.perf_counter()
        return event

    def seconds(self, marks: Sequence[Any]) -> Sequence[float] | None:
        if not marks[-1].query():
            return None
        return [self._moment(mark) for mark in marks]

    def _moment(self, mark: Any) -> float:
        if mark is not self._last:
            self._seconds += self._last.elapsed_time(mark) / 1000
            self._last = mark
        return self._seconds
