"""Whose turn it is, as `benchmarks.adaptive` and its two servers share it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAIN, ADAPTIVE = "plain", "adaptive"  # the names of the servers' turns that are no fixed K's
# Steps of a turn, before those that count: 1.02 times as long as later ones even behind the fourth,
# for caches are as the other server left them.
UNCOUNTED = 12
_NAME, _SIZE = "state", 12
_GOING, _IS_PLAINS, _PLAIN_WAITS, _IS_ALONE = range(4)
_BATCH, _CYCLE, _MIDDLE, _END = slice(4, 6), slice(6, 8), slice(8, 10), slice(10, 12)


class TurnState:
    """A file that all three have mapped; each field has one writer at a time.

    The benchmark says that turns are taken, and at how many requests. The server with drafts gives
    the turn to the plain one, which says that it waits for one, and gives it back.
    """

    def __init__(self, folder: Path) -> None:
        with (folder / _NAME).open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _SIZE)

    @classmethod
    def made(cls, folder: Path) -> TurnState:
        (folder / _NAME).write_bytes(bytes(_SIZE))
        return cls(folder)

    def begin(self, batch: int, is_alone: bool) -> None:
        """Turns are taken while ``batch`` requests run, or the server with drafts has them
        alone."""
        self._bytes[_IS_PLAINS] = self._bytes[_PLAIN_WAITS] = False
        self._bytes[_MIDDLE] = self._bytes[_END] = bytes(2)
        self._bytes[_BATCH] = batch.to_bytes(2, "little")
        self._bytes[_IS_ALONE] = is_alone
        self._bytes[_GOING] = not is_alone

    def stop(self) -> None:
        """Nobody waits any longer: a reply has ended."""
        self._bytes[_GOING] = False

    @property
    def is_going(self) -> bool:
        return bool(self._bytes[_GOING])

    @property
    def is_alone(self) -> bool:
        """Whether the plain server has no requests."""
        return bool(self._bytes[_IS_ALONE])

    @property
    def cycle(self) -> int:
        """How often all have had turns."""
        return int.from_bytes(self._bytes[_CYCLE], "little")

    def next_cycle(self) -> None:
        self._bytes[_CYCLE] = (self.cycle + 1).to_bytes(2, "little")

    def counts(self, batch: Any) -> bool:
        """Whether a step of this batch is one of the load's."""
        return self.is_going and len(batch.reqs) == int.from_bytes(self._bytes[_BATCH], "little")

    @property
    def middle(self) -> int:
        """Tokens of a request at which the plain server's steps are to be compared."""
        return int.from_bytes(self._bytes[_MIDDLE], "little")

    @property
    def end(self) -> int:
        """Tokens of a request at which the plain server's turn ends."""
        return int.from_bytes(self._bytes[_END], "little")

    def give_plain_a_turn(self, middle: int, end: int) -> None:
        """Until the plain server has had it."""
        self._bytes[_MIDDLE] = middle.to_bytes(2, "little")
        self._bytes[_END] = end.to_bytes(2, "little")
        self._bytes[_IS_PLAINS] = True
        self.wait_for_plain()

    def wait_for_plain(self) -> None:
        """Until the plain server waits for a turn."""
        self._wait(lambda: not self._bytes[_IS_PLAINS] and bool(self._bytes[_PLAIN_WAITS]))

    def wait_for_turn(self) -> None:
        """Gives back the turn that the plain server may have had, and waits for the next one."""
        self._bytes[_IS_PLAINS] = False
        self._bytes[_PLAIN_WAITS] = True
        self._wait(lambda: bool(self._bytes[_IS_PLAINS]))
        self._bytes[_PLAIN_WAITS] = False

    def _wait(self, until: Callable[[], bool]) -> None:
        while self.is_going and not until():
            time.sleep(0.001)
