"""What the packed linears take of every decode iteration of a real server, on CPU.

$STEP_TIMES names the file that gets [batch size, seconds, seconds within ``ops.linear``] of each,
when the server is idle.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from instant_models import Clock, register_clock

from sglang_ascend.plugin.cpu import layers


class LinearClock(Clock):
    """``Clock``, with the linears' share."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.linear = layers.linear.linear

    def timed_linear(self, *args: Any) -> Any:
        start = time.perf_counter()
        output = self.linear(*args)
        self.seconds += time.perf_counter() - start
        return output

    def tick(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        count = len(self.times)
        batch = super().tick(original, scheduler, *args, **kwargs)
        if len(self.times) > count:
            self.times[-1] = (*self.times[-1], self.seconds)
        self.seconds = 0.0
        return batch


def install() -> None:
    clock = LinearClock()
    prepare = layers.linear.prepare
    layers.linear = SimpleNamespace(prepare=prepare, linear=clock.timed_linear)
    register_clock(clock)
