"""Every series is in /metrics from the start, at 0, and follows the watchdog and the timeline.

In a process of its own, for prometheus_client asks for its folder when it is imported; collected as
SGLang's /metrics does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

PROGRAM = """
import json, sys
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from sglang_ascend.plugin.observability import metrics
from sglang_ascend.speculative.timeline import StepTimes

def collect():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return [
        (sample.name, sample.labels, sample.value)
        for family in registry.collect()
        for sample in family.samples
        if "_bucket" not in sample.name
    ]

metrics._scheduler_labels = lambda: {"model_name": "m", "tp_rank": 0}
acceptance, phases = metrics.AcceptanceMetrics(), metrics.PhaseMetrics()
drafts = metrics.DraftMetrics(2)
seen = [collect()]
acceptance.change("collapsed", True)
seen.append(collect())
acceptance.change("collapsed", False)
acceptance.change("perfect", True)
drafts.add([4, 4], [3, 1])
drafts.add([1, 0], [1, 0])
phases.observe(StepTimes(8, (1.0, 1.5, 3.5, 3.75, 4.0, 4.125)))
seen.append(collect())
print(json.dumps(seen))
"""


def values(samples: list) -> dict[str, float]:
    """By short name, with the kind, the phase or the position."""
    found = {}
    for name, labels, value in samples:
        assert name.startswith("sglang_ascend:")
        assert (labels.pop("model_name"), labels.pop("tp_rank")) == ("m", "0")
        found[" ".join([name.removeprefix("sglang_ascend:"), *labels.values()])] = value
    return found


def test_series_start_at_0_and_count_what_happens(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    start, collapsed, later = map(values, json.loads(done.stdout.splitlines()[-1]))

    phases = ("prepare", "target", "verify", "draft", "result")
    at_rest = {
        "acceptance_alarm collapsed": 0,
        "acceptance_alarm perfect": 0,
        "acceptance_collapsed_total": 0,
        "acceptance_perfect_total": 0,
    } | {f"step_phase_seconds_{part} {phase}": 0 for part in ("sum", "count") for phase in phases}
    kinds = ("drafts_total", "accepted_drafts_total")
    at_rest |= {f"{kind} {position}": 0 for kind in kinds for position in (1, 2)}
    assert start == at_rest
    assert collapsed == at_rest | {
        "acceptance_alarm collapsed": 1,
        "acceptance_collapsed_total": 1,
    }
    counts = {f"step_phase_seconds_count {phase}": 1 for phase in phases}
    seconds = zip(phases, (0.5, 2.0, 0.25, 0.25, 0.125), strict=True)
    assert later == at_rest | counts | {
        "acceptance_alarm perfect": 1,
        "acceptance_collapsed_total": 1,
        "acceptance_perfect_total": 1,
        "drafts_total 1": 5,
        "drafts_total 2": 4,
        "accepted_drafts_total 1": 4,
        "accepted_drafts_total 2": 1,
    } | {f"step_phase_seconds_sum {phase}": value for phase, value in seconds}
