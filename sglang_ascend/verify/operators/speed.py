"""How much faster a body is than what would serve in its place, alternating in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_ascend.verify.checks import Check, Progress, found_by
from sglang_ascend.verify.operators.against_reference import BoundCall, bound_calls

CALLS_PER_ROUND = 20
WARM_UP_ROUNDS = 2


def microseconds(run: Callable[[], Any], device: str) -> float:
    """Of one call of many in a row: launches overlap, as they do in a step."""
    wait = torch.get_device_module(device).synchronize
    wait()
    start = time.perf_counter()
    for _ in range(CALLS_PER_ROUND):
        run()
    wait()
    return 1e6 * (time.perf_counter() - start) / CALLS_PER_ROUND


def time_call(call: BoundCall, rounds: int) -> Check:
    """A ratio above 1 says that the body is faster; times are of the device named in the report.
    Never raises."""
    return found_by(call.name, lambda: _timed(call, rounds))


def _timed(call: BoundCall, rounds: int) -> Check:
    reason = call.declined()
    if reason:
        return Check(call.name, None, note=reason)
    args, kwargs = call.prepare(call.device)
    _, other, *_ = call.op.bodies(call.device)
    runs = {
        "body": lambda: call.body(*args, **kwargs),
        other.name: lambda: other.function(*args, **kwargs),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-WARM_UP_ROUNDS, rounds):
        # Whoever goes second may meet a warmer machine: swap the order every round.
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            elapsed = microseconds(runs[name], call.device)
            if number >= 0:
                times[name].append(elapsed)
    ratios = [theirs / mine for theirs, mine in zip(times[other.name], times["body"], strict=True)]
    measured = {f"{name} (µs)": statistics.median(values) for name, values in times.items()}
    measured[f"{other.name} / body"] = statistics.median(ratios)
    return Check(call.name, None, {**measured, "least": min(ratios), "most": max(ratios)})


def time_operators(device: str, rounds: int, progress: Progress) -> list[Check]:
    calls = bound_calls(device)
    checks = []
    for call in calls:
        progress(call.name, len(calls))
        checks.append(time_call(call, rounds))
    return checks
