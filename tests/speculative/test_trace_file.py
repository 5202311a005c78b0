"""A trace opens in Perfetto and chrome://tracing at every moment of a server's life: it is one JSON
array of complete events that nest and add up, after every step and after a kill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from step_trace import check_step, events_of, steps_of

from sglang_ascend.speculative.timeline import PHASES, StepTimes
from sglang_ascend.speculative.trace_file import TraceFile

STEPS = [
    StepTimes(4, (10.0, 10.000_100_4, 10.012, 10.0135, 10.017, 10.017_05)),
    StepTimes(1, (10.02, 10.02, 10.03, 10.03, 10.031, 10.031_000_6)),
]


def test_events_have_the_fields_of_the_format_nest_and_add_up(tmp_path):
    trace = TraceFile(tmp_path / "new" / "folder", "scheduler TP0")
    for step in STEPS:
        trace.write(step)
    events = events_of(trace.path)
    names = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"process_name": "scheduler TP0", "thread_name": "speculative steps"}
    assert {event["ph"] for event in events} == {"M", "X"}
    assert {event["pid"] for event in events} == {os.getpid()}
    written = steps_of(events)
    for step in written:
        check_step(*step)
    assert [step[0]["args"]["batch_size"] for step in written] == [4, 1]
    assert [step[0]["ts"] for step in written] == [10_000_000, 10_020_000]
    assert [phase["dur"] for phase in written[0][1:]] == [100, 11_900, 1_500, 3_500, 50]


def test_the_file_opens_after_every_step(tmp_path):
    trace = TraceFile(tmp_path, "scheduler")
    for num_written in range(20):
        assert len(steps_of(events_of(trace.path))) == num_written
        trace.write(STEPS[num_written % 2])


KILLED = """
import os, signal, sys
from pathlib import Path
from sglang_ascend.speculative.timeline import StepTimes
from sglang_ascend.speculative.trace_file import TraceFile
trace = TraceFile(Path(sys.argv[1]), "scheduler")
for i in range(50):
    trace.write(StepTimes(1, tuple(i + j / 10 for j in range(6))))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_every_step_that_it_finished(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    (path,) = tmp_path.iterdir()
    steps = steps_of(events_of(path))
    assert len(steps) == 50
    for step in steps:
        check_step(*step)


def test_a_file_has_a_greatest_size_and_says_once_that_it_is_full(tmp_path, caplog):
    trace = TraceFile(tmp_path, "scheduler", max_bytes=5000)
    for _ in range(100):
        trace.write(STEPS[0])
    size = trace.path.stat().st_size
    assert 4000 < size <= 5000
    num_steps = len(steps_of(events_of(trace.path)))
    assert num_steps == (len(events_of(trace.path)) - 2) / (1 + len(PHASES)) > 1
    (record,) = caplog.records
    assert str(trace.path) in record.getMessage() and "full" in record.getMessage()


def test_a_disk_that_is_full_ends_the_trace_and_not_the_server(tmp_path, caplog):
    trace = TraceFile(tmp_path, "scheduler")
    with open("/dev/full", "wb") as full_disk:
        os.dup2(full_disk.fileno(), trace._file.fileno())
    for step in STEPS:
        trace.write(step)
    (record,) = caplog.records
    assert "No space left" in record.getMessage()


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        TraceFile(tmp_path / "file" / "folder", "scheduler")


# Broken on purpose: what the checks above must catch.


def test_a_phase_that_outlives_its_step_is_found(tmp_path):
    trace = TraceFile(tmp_path, "scheduler")
    trace.write(STEPS[0])
    ((step, *phases),) = steps_of(events_of(trace.path))
    phases[-1]["dur"] += 1
    with pytest.raises(AssertionError):
        check_step(step, *phases)


def test_a_file_that_was_cut_inside_an_event_is_found(tmp_path):
    trace = TraceFile(tmp_path, "scheduler")
    trace.write(STEPS[0])
    trace.path.write_text(trace.path.read_text()[:-9])
    with pytest.raises(json.JSONDecodeError):
        events_of(trace.path)
