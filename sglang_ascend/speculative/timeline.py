"""Where the time of a speculative step goes: marks around the step's calls on its models.

The step itself is not touched, and nothing here waits for a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

# In the order in which they follow each other, without a gap:
PHASES = (
    "prepare",  # positions, slots, lengths, block table
    "target",  # the verify forward
    "verify",  # sampling, acceptance, publishing the new lengths
    "draft",  # the MTP layer: extend and tail
    "result",  # what the worker does until it returns
)


@dataclass(frozen=True)
class StepTimes:
    """One finished step."""

    batch_size: int
    moments: tuple[float, ...]  # seconds, [6]: the start of each phase, and the end

    @property
    def durations(self) -> dict[str, float]:
        """Seconds of each phase; together they are the step."""
        spans = (after - before for before, after in pairwise(self.moments))
        return dict(zip(PHASES, spans, strict=True))


class Clock(Protocol):
    """Takes marks now and says later when they were, so that a device's events can be one."""

    def mark(self) -> Any:
        """This moment of the host, or of the device's stream. Never waits."""
        ...

    def seconds(self, marks: Sequence[Any]) -> Sequence[float] | None:
        """When the marks were, in seconds from any origin; None while that is not known yet.
        Never waits."""
        ...


class HostClock:
    """The host's own time: what a step takes where the models run on the CPU. On a device it
    would be the time to launch the work; such a device needs a Clock of its own."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[float]) -> Sequence[float]:
        return marks


class StepTimeline:
    """Times steps one after another and hands each to every one of ``sinks`` once it is known."""

    def __init__(self, sinks: Sequence[Callable[[StepTimes], None]], clock: Clock) -> None:
        self._sinks = sinks
        self._clock = clock
        self._models: TimedModels | None = None
        self._unread: deque[tuple[int, tuple[Any, ...]]] = deque()

    def begin(self, models: Any) -> Any:
        """Starts a step on ``models`` (step.Models); it must run on the returned ones."""
        self._models = TimedModels(models, self._clock.mark)
        return self._models

    def finish(self, batch_size: int) -> None:
        """Ends the step that ``begin`` started."""
        assert self._models is not None
        self._unread.append((batch_size, (*self._models.moments(), self._clock.mark())))
        self._models = None
        while self._unread:
            size, marks = self._unread[0]
            seconds = self._clock.seconds(marks)
            if seconds is None:
                return
            self._unread.popleft()
            for sink in self._sinks:
                sink(StepTimes(size, tuple(seconds)))


class TimedModels:
    """The models of one step, with a mark wherever a call on them ends a phase."""

    def __init__(self, models: Any, mark: Callable[[], Any]) -> None:
        self._models = models
        self._mark = mark
        self._start = mark()

    def __getattr__(self, name: str) -> Any:
        """Every other call, such as ``accept``, lies inside a phase."""
        return getattr(self._models, name)

    def verify(self, *args: Any) -> Any:
        self._target = self._mark()
        result = self._models.verify(*args)
        self._verify = self._mark()
        return result

    def publish(self, *args: Any) -> None:
        self._models.publish(*args)
        self._draft = self._mark()

    def extend(self, *args: Any) -> Any:
        result = self._models.extend(*args)
        self._result = self._mark()
        return result

    def tail(self, *args: Any) -> Any:
        result = self._models.tail(*args)
        self._result = self._mark()
        return result

    def moments(self) -> tuple[Any, ...]:
        """The start of every phase, as marks."""
        return (self._start, self._target, self._verify, self._draft, self._result)
