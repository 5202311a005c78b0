"""Steps whose accepted drafts the scheduler has not told yet."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Unsettled(Generic[T]):
    """What is to be known of each step when its accepted drafts are told, oldest step first."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, T]] = deque()

    def append(self, batch_size: int, step: T) -> None:
        self._steps.append((batch_size, step))

    def settle(self, batch_size: int) -> T | None:
        """The oldest step, of so many requests; what is of others was dropped, and goes with it."""
        while self._steps:
            num_requests, step = self._steps.popleft()
            if num_requests == batch_size:
                return step
        return None
