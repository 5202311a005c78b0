"""Where the time of a speculative step goes: marks around the step's phases.

The step itself is not touched, and nothing here waits for a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang_ascend.speculative.step import Phases

# In the order in which they follow each other, without a gap:
PHASES = (
    "prepare",  # positions, slots, lengths, block table
    "target",  # the verify forward
    "verify",  # sampling, acceptance, publishing the new lengths
    "draft",  # the MTP layer: extend and draft decodes
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
    would be the time to launch the work."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[float]) -> Sequence[float]:
        return marks


class StepTimeline:
    """Times steps one after another and hands each to every one of ``sinks`` once it is known."""

    def __init__(self, sinks: Sequence[Callable[[StepTimes], None]], clock: Clock) -> None:
        self._sinks = sinks
        self._clock = clock
        self._marks: list[Any] = []
        self._unread: deque[tuple[int, tuple[Any, ...]]] = deque()

    def begin(self, phases: Phases) -> Phases:
        """Starts a step on ``phases``; it must run on the returned ones."""
        self._marks = [self._clock.mark()]
        return TimedPhases(phases, lambda: self._marks.append(self._clock.mark()))

    def finish(self, batch_size: int) -> None:
        """Ends the step that ``begin`` started."""
        self._unread.append((batch_size, (*self._marks, self._clock.mark())))
        while self._unread:
            size, marks = self._unread[0]
            seconds = self._clock.seconds(marks)
            if seconds is None:
                return
            self._unread.popleft()
            for sink in self._sinks:
                sink(StepTimes(size, tuple(seconds)))


class TimedPhases:
    """The phases of one step, with a mark wherever one begins or ends."""

    def __init__(self, phases: Phases, mark: Callable[[], None]) -> None:
        self._phases, self._mark = phases, mark

    def prepare(self, candidates: Any, requests: Any) -> Any:
        positions = self._phases.prepare(candidates, requests)
        self._mark()
        return positions

    def verify(self) -> Any:
        logits = self._phases.verify()
        self._mark()
        return logits

    @property
    def hidden(self) -> Any:
        return self._phases.hidden

    def draft(self, sampled: Any, accept_lens: Any, new_seq_lens: Any) -> Any:
        self._mark()
        next_candidates = self._phases.draft(sampled, accept_lens, new_seq_lens)
        self._mark()
        return next_candidates
