"""How eagerly a server changes K, and tries others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Costs are in steps: what a step of the current K takes."""

    margin: float = 0.01  # a gain below this never changes K
    switch_cost: float = 1.0  # steps that must have been lost to the better K before it is taken
    decision_steps: int = 4  # from one decision to the next
    changes_a_step: float = 1 / 16  # of K, of which a probe makes two, at most on average
    most_changes: float = 24.0  # that may come one behind the other
    probe_steps: int = 6  # of another K, behind a first that is not timed; and between two probes
    probe_share: float = 0.005  # of all steps, that probes of no expected gain may cost
    probe_changes: float = 0.5  # steps that the two changes of K around a probe cost
    least_horizon: float = 50.0  # steps for which what a probe finds is of use
    most_horizon: float = 2000.0
