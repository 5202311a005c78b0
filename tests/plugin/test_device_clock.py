"""The clock of a device that works behind the host: its marks are events."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch


class Event:
    """A device's, whose times lie apart by a float32 of milliseconds."""

    now = 0.0
    happened_until = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.moment = Event.now

    def query(self) -> bool:
        return self.moment <= Event.happened_until

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query()
        return float(np.float32(1000 * (later.moment - self.moment)))


@pytest.fixture
def device_clock(monkeypatch):
    from sglang_ascend.plugin.observability.device_clock import DeviceClock

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    return DeviceClock("npu")


def test_a_devices_marks_are_known_once_they_have_happened(device_clock):
    marks = [device_clock.mark()]
    Event.now += 2.0
    marks.append(device_clock.mark())
    Event.happened_until = 1.0
    assert device_clock.seconds(marks) is None
    Event.happened_until = 2.0
    begun, ended = device_clock.seconds(marks)
    assert ended - begun == pytest.approx(2.0)


def test_a_step_of_a_device_is_as_long_after_weeks(device_clock):
    week, step = 7 * 24 * 3600.0, 0.0125
    marks = [device_clock.mark()]
    for seconds in (week, week, week, step):
        Event.now = Event.happened_until = Event.now + seconds
        marks.append(device_clock.mark())
    begun, ended = device_clock.seconds(marks)[-2:]
    assert ended - begun == pytest.approx(step, rel=1e-4)
    first, *_, last = marks
    from_start = [first.elapsed_time(mark) / 1000 for mark in (marks[-2], last)]
    assert from_start[1] - from_start[0] != pytest.approx(step, rel=0.5), "float32 is not enough"
