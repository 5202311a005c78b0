"""Steps of one kind, one behind the other: which of them say nothing of what they cost."""

from __future__ import annotations

import math

from sglang_ascend.speculative.adaptive.costs.one_load import Kind, LoadCosts

# Deviations, and a logarithm: a step is a surprise if it is off its cost by more than these. So
# many, one behind the other, say that the machine has become slower or faster.
SURPRISE, JUMP, SURPRISES = 4.0, math.log(1.3), 3


class Run:
    """Of steps of ``kind`` at one load.

    A surprise is left out, for the machine paused, which any kind may meet. Where the machine has
    become slower or faster the costs of all kinds jump together, and it is to be told whether their
    ratios are in doubt too.
    """

    def __init__(self, load: LoadCosts, kind: Kind) -> None:
        self.load, self.kind = load, kind
        self._surprises = 0  # one behind the other, of steps that took longer; below 0: shorter
        self._quiet = SURPRISES  # steps since the last surprise
        self._is_amid = False  # whether steps before said what this kind costs now

    @property
    def is_quiet(self) -> bool:
        """Whether the next step finds the machine as the last one left it. A pause may end as the
        run does: it is no difference between its kind and the next one."""
        return self._quiet >= SURPRISES

    def leaves_out(self, innovation: float, variance: float) -> bool:
        """A step that took so much more than its cost, of which ``variance`` was expected."""
        if abs(innovation) <= max(JUMP, SURPRISE * math.sqrt(variance)):
            if not self._is_amid:
                self.load.suspects.discard(self.kind)
            self._surprises, self._is_amid = 0, True
            self._quiet += 1
            return False
        self._quiet = 0
        sign = 1 if innovation > 0 else -1
        self._surprises = sign * max(0, sign * self._surprises) + sign
        if abs(self._surprises) < SURPRISES:
            return True
        self.load.jump(self._doubtful(innovation))
        self._surprises, self._is_amid = 0, True
        return False

    def _doubtful(self, innovation: float) -> float:
        """The part of a jump that may be of one cost alone."""
        if innovation < 0:
            # Faster than ever: all was learnt beside what slowed the machine.
            log_seconds = self.load.log_seconds(self.kind) + innovation
            return max(0.0, self.load.fastest[self.kind] - log_seconds)
        if self._is_amid:
            return 0.0
        # The machine may have become slower just as this kind's turn came, but not twice.
        is_again = self.kind in self.load.suspects
        self.load.suspects.add(self.kind)
        return innovation if is_again else 0.0
