"""A trace of speculative steps, read back, and what Perfetto and chrome://tracing ask of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_ascend.speculative.timeline import PHASES


def events_of(path: Path) -> list[dict[str, Any]]:
    """Strict JSON, more than the viewers need: both forgive an array that lacks its end."""
    events = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(events, list)
    return events


def steps_of(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """[step, its phases] of every step."""
    spans = [event for event in events if event["ph"] == "X"]
    width = 1 + len(PHASES)
    return [spans[i : i + width] for i in range(0, len(spans), width)]


def check_step(step: dict[str, Any], *phases: dict[str, Any]) -> None:
    """What both ask of complete events: perfect nesting, which integers keep exactly."""
    assert step["name"] == "step"
    assert [phase["name"] for phase in phases] == list(PHASES)
    for event in (step, *phases):
        assert all(type(event[key]) is int for key in ("ts", "dur", "pid", "tid"))
        assert event["dur"] >= 0
    ends = [phase["ts"] + phase["dur"] for phase in phases]
    assert [phase["ts"] for phase in phases] == [step["ts"], *ends[:-1]]
    assert ends[-1] == step["ts"] + step["dur"]
    assert sum(phase["dur"] for phase in phases) == step["dur"]
    assert len({(event["pid"], event["tid"]) for event in (step, *phases)}) == 1
