"""Which K would be best at each batch size, from given acceptance and costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ascend.speculative.adaptive.costs.kept import KeptCosts, KeptCostsError, read
from sglang_ascend.speculative.adaptive.value import StepCosts, expected_tokens, speedups
from sglang_ascend.svg import INK, document, line, text


class PlanError(ValueError):
    """A plan cannot be made of what was given; the message is one sentence that says why."""


@dataclass(frozen=True)
class Row:
    """One batch size."""

    batch: int
    speedups: list[float]  # S(B,0), S(B,1), ...

    @property
    def best(self) -> int:
        return max(range(len(self.speedups)), key=self.speedups.__getitem__)


@dataclass(frozen=True)
class Plan:
    acceptance: list[float]
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        max_drafts = len(self.rows[0].speedups) - 1
        return {
            "acceptance": self.acceptance,
            "expected_tokens": [expected_tokens(self.acceptance, k) for k in range(max_drafts + 1)],
            "batches": {
                str(row.batch): {"speedups": row.speedups, "best": row.best} for row in self.rows
            },
        }


@dataclass(frozen=True)
class LinearCosts:
    """A machine by four numbers, in milliseconds.

    The target takes no less than its weights take to be read, whatever the rows, nor less than the
    rows take to be computed; so does the MTP layer. Raises PlanError where one is no time.
    """

    target_ms: float
    target_row_ms: float
    draft_ms: float
    draft_row_ms: float = 0.0
    overhead_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise PlanError(f"--{name.replace('_', '-')} {value} is no time.")

    def at(self, batch: int, max_drafts: int) -> StepCosts:
        def target(rows: int) -> float:
            return max(self.target_ms, batch * rows * self.target_row_ms)

        return StepCosts(
            [target(rows) for rows in range(1, max_drafts + 2)],
            max(self.draft_ms, batch * self.draft_row_ms),
            self.overhead_ms,
        )


def read_costs(path: Path) -> tuple[list[float] | None, dict[int, StepCosts]]:
    """(acceptance, if the file has it; costs by batch size) of measured costs in a JSON file:

    {"acceptance": [a_1, ...], "batches": {"1": {"target_ms": [T(1,1), T(1,2), ...],
    "draft_ms": T_draft, "overhead_ms": T_overhead}, ...}}

    or in one that a server with --speculative-adaptive has kept. Raises PlanError, and
    KeptCostsError of such a file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "loads" in found:
            batches = _of_steps(read(path))
        else:
            batches = {
                int(batch): StepCosts(
                    [float(ms) for ms in costs["target_ms"]],
                    float(costs["draft_ms"]),
                    float(costs.get("overhead_ms", 0.0)),
                )
                for batch, costs in found["batches"].items()
            }
        acceptance = found.get("acceptance")
        rates = None if acceptance is None else [float(rate) for rate in acceptance]
    except KeptCostsError:  # a sentence already
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} has no costs of steps ({error!r}): see docs/adaptive.md."
        ) from None
    if not batches:
        raise PlanError(f"{path} names no batch size: see docs/adaptive.md.")
    return rates, batches


def _of_steps(kept: KeptCosts) -> dict[int, StepCosts]:
    """What whole steps cost, of each K up to the largest that was timed; of a batch size with
    several contexts, at the one that was served most."""
    most_served = sorted(kept.loads, key=lambda load: sum(kind.steps for kind in load.kinds))
    contexts = {load.batch: load.context for load in most_served}
    most_drafts = max((kind.drafts for load in kept.loads for kind in load.kinds), default=0)
    costs = kept.restored()
    return {
        batch: StepCosts(
            [1e3 * costs.of(batch, context).seconds((k, k)) for k in range(most_drafts + 1)], 0.0
        )
        for batch, context in contexts.items()
    }


def make_plan(acceptance: Sequence[float], costs: dict[int, StepCosts], max_drafts: int) -> Plan:
    """Raises PlanError where a rate or a cost is none, a batch has no request, or no cost
    of ``max_drafts`` drafts."""
    if not acceptance or not all(0 <= rate <= 1 for rate in acceptance):
        raise PlanError("acceptance is a share between 0 and 1 for each position, as 0.8,0.7,0.6.")
    for batch, of_batch in costs.items():
        if len(of_batch.target) <= max_drafts:
            raise PlanError(
                f"batch {batch} has costs of up to {len(of_batch.target)} rows a request, and "
                f"{max_drafts} drafts need {max_drafts + 1}: give more, or a lower --max-drafts."
            )
        if batch < 1:
            raise PlanError(f"batch {batch} has no request: name a size of at least 1.")
        times = *of_batch.target, of_batch.draft, of_batch.overhead
        if not all(map(math.isfinite, times)) or min(of_batch.target) <= 0 or min(times) < 0:
            raise PlanError(f"batch {batch} has a cost that is no time.")
    rows = [
        Row(batch, speedups(acceptance, of_batch, max_drafts))
        for batch, of_batch in sorted(costs.items())
    ]
    return Plan(list(acceptance), rows)


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 50, 90, 40, 50
COLORS = ("#9aa5b1", "#93c5fd", "#60a5fa", "#2563eb", "#1e40af", "#7c3aed", "#db2777", "#ea580c")


def draw(plan: Plan) -> str:
    """An SVG: a line for each K over the batch sizes, which stand evenly."""
    highest = max(max(row.speedups) for row in plan.rows) * 1.05
    step = (WIDTH - LEFT - RIGHT) / max(1, len(plan.rows) - 1)

    def point(place: int, value: float) -> tuple[float, float]:
        return LEFT + place * step, TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / highest)

    def lines() -> Iterable[str]:
        for k in range(len(plan.rows[0].speedups)):
            points = [point(place, row.speedups[k]) for place, row in enumerate(plan.rows)]
            color = COLORS[k % len(COLORS)]
            yield line(points, color)
            x, y = points[-1]
            yield text(x + 8, y + 4, f"K = {k}", color=color)
        for place, row in enumerate(plan.rows):
            x, y = point(place, row.speedups[row.best])
            yield f'<circle cx="{x:.0f}" cy="{y:.1f}" r="4" fill="none" stroke="{INK}"/>'
            yield text(x, HEIGHT - BOTTOM + 18, str(row.batch), 'text-anchor="middle"')

    title = "predicted speed-up of K drafts by batch size (best: circle)"
    return document(WIDTH, HEIGHT, title, [text(LEFT, 20, title), *lines()])
