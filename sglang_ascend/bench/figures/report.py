"""From rounds to figures: per task, their mean, acceptance by position and by number of drafts."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_ascend.bench.figures.acceptance import Acceptance
from sglang_ascend.bench.figures.ratios import DRAWS, median_interval, middle
from sglang_ascend.bench.rounds import Round

MOST_DRAFTS = 8
LEAST_ROUNDS = 3  # that have a spread


def summarise(rounds: Sequence[Round], baseline: str | None, main: str) -> dict[str, Any]:
    """`tasks`, `mean` and `acceptance`; ratios are of ``main`` over ``baseline``."""
    names = list(rounds[0].samples)
    straight = [one for one in rounds if not one.loops]
    tasks = {}
    for task in dict.fromkeys(one.task for one in rounds):
        mine = [one for one in rounds if one.task == task]
        tasks[task] = _figures([one for one in mine if not one.loops], names, baseline, main)
        tasks[task]["looping"] = _figures([one for one in mine if one.loops], names, baseline, main)
    pooled = {name: acceptance_of(straight or rounds, name) for name in names}
    return {
        "tasks": tasks,
        "mean": _mean(tasks, straight, baseline, main),
        "acceptance": {
            name: {
                "forwards": one.forwards,
                "histogram": list(one.histogram),
                "per_position": one.per_position,
                "accept_length": one.length,
            }
            for name, one in pooled.items()
            if one
        },
        "num_steps": _by_num_steps(straight or rounds, pooled, baseline),
    }


def paired(reports: Mapping[str, Mapping[str, Any]]) -> list[Round]:
    """The rounds that two reports share, as if their main servers had been in one run.

    Raises:
        ValueError: they share none, or their replies had other lengths or batches.
    """
    (name, one), (other_name, other) = reports.items()
    for key in ("max_new_tokens", "batch"):
        if one[key] != other[key]:
            raise ValueError(f"the reports differ in {key}: {one[key]} and {other[key]}.")
    theirs = dict(_numbered(other["rounds"]))
    rounds = [
        Round.of_json(
            row
            | {
                "samples": {
                    name: row["samples"][one["main"]],
                    other_name: their["samples"][other["main"]],
                }
            }
        )
        for key, row in _numbered(one["rounds"])
        if (their := theirs.get(key))
    ]
    if not rounds:
        raise ValueError("the reports have no round of the same task and prompts.")
    return rounds


def _numbered(rounds: Iterable[dict[str, Any]]) -> Iterator[tuple[object, dict[str, Any]]]:
    """Each with what it is paired by: task and prompts, and how often these came before."""
    before: Counter[tuple[str, str]] = Counter()
    for row in rounds:
        same = row["task"], row["prompts"]
        yield (*same, before[same]), row
        before[same] += 1


def acceptance_of(rounds: Iterable[Round], name: str) -> Acceptance | None:
    found = [acceptance for one in rounds if (acceptance := one.samples[name].acceptance)]
    return sum(found[1:], found[0]) if found else None


def _ratios(rounds: Iterable[Round], baseline: str, main: str) -> list[float]:
    return [one.samples[main].tok_s / one.samples[baseline].tok_s for one in rounds]


def _figures(
    rounds: Sequence[Round], names: Sequence[str], baseline: str | None, main: str
) -> dict[str, Any]:
    """Medians over rounds; null where there is no round or no such server, and no interval of one
    or two rounds."""
    figures: dict[str, Any] = {"rounds": len(rounds)}
    for name in names:
        rates = [one.samples[name].tok_s for one in rounds]
        figures[f"{name}_tok_s"] = statistics.median(rates) if rates else None
    ratios = _ratios(rounds, baseline, main) if baseline else []
    low, high = median_interval(ratios) if len(ratios) >= LEAST_ROUNDS else (None, None)
    acceptance = acceptance_of(rounds, main)
    lookup = [one.samples[main].lookup_histogram for one in rounds]
    counts = Acceptance(tuple(map(sum, zip(*lookup, strict=True)))) if lookup else None
    return figures | {
        "speedup": statistics.median(ratios) if ratios else None,
        "speedup_low": low,
        "speedup_high": high,
        "accept_length": acceptance.length if acceptance else None,
        "lookup_accept_length": counts.length if counts and counts.forwards else None,
    }


def _mean(
    tasks: Mapping[str, Mapping[str, Any]],
    straight: Sequence[Round],
    baseline: str | None,
    main: str,
) -> dict[str, Any]:
    """Of the tasks that have figures; the interval resamples the rounds of each task."""
    known = {name: row for name, row in tasks.items() if row["rounds"]}
    mean: dict[str, Any] = {"tasks": len(known)}
    for key in next(iter(tasks.values())):
        values = [row[key] for row in known.values() if key not in ("rounds", "looping")]
        if values and None not in values:
            mean[key] = statistics.fmean(values)
    mean["speedup_low"] = mean["speedup_high"] = None
    if known and baseline and max(row["rounds"] for row in known.values()) >= LEAST_ROUNDS:
        rng = random.Random(0)
        ratios = [
            _ratios((one for one in straight if one.task == task), baseline, main) for task in known
        ]
        mean["speedup_low"], mean["speedup_high"] = middle(
            statistics.fmean(statistics.median(rng.choices(row, k=len(row))) for row in ratios)
            for _ in range(DRAWS)
        )
    return mean


def _by_num_steps(
    rounds: Sequence[Round], pooled: Mapping[str, Acceptance | None], baseline: str | None
) -> dict[str, dict[str, Any]]:
    """For K = 1 to 8: as a server with K drafts had it, else cut from chains of a larger K."""
    servers = {one.num_drafts: name for name, one in pooled.items() if one}
    rows: dict[str, dict[str, Any]] = {}
    for num_steps in range(1, MOST_DRAFTS + 1):
        larger = [k for k in sorted(servers) if k >= num_steps]
        if not larger:
            break
        name = servers[larger[0]]
        one, is_measured = pooled[name], larger[0] == num_steps
        row: dict[str, Any] = {"measured": is_measured, "tok_s": None, "speedup": None}
        row["accept_length"] = one.length_of_first(num_steps) if one else None
        if is_measured:
            row["tok_s"] = statistics.median(each.samples[name].tok_s for each in rounds)
            if baseline:
                row["speedup"] = statistics.median(_ratios(rounds, baseline, name))
        rows[str(num_steps)] = row
    return rows
