"""This package's series in SGLang's /metrics: same registry, same labels as the scheduler's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_SCHEDULER,
    SchedulerMetricsCollector,
    resolve_collector_class,
)
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

from sglang_ascend.speculative.acceptance_watchdog import KINDS
from sglang_ascend.speculative.timeline import PHASES, StepTimes

# 100 us to 3.3 s.
PHASE_BUCKETS_S = tuple(1e-4 * 2**i for i in range(16))


class AcceptanceMetrics:
    """How often each alarm was raised, and which are on now."""

    def __init__(self) -> None:
        labels = _scheduler_labels()
        alarm = _metric(
            "gauge",
            "acceptance_alarm",
            "Whether acceptance is of this kind now (0 or 1).",
            (*labels, "kind"),
            multiprocess_mode="mostrecent",
        )
        # Every series is there from the start, so that the first alarm is an increase from 0; a
        # gauge of this mode appears when it is first set.
        self._alarms = {kind: alarm.labels(**labels, kind=kind) for kind in KINDS}
        self._totals = {
            kind: _metric(
                "counter",
                f"acceptance_{kind}_total",
                f"How often acceptance became {kind}.",
                tuple(labels),
            ).labels(**labels)
            for kind in KINDS
        }
        for gauge in self._alarms.values():
            gauge.set(0)

    def change(self, kind: str, is_active: bool) -> None:
        self._alarms[kind].set(int(is_active))
        if is_active:
            self._totals[kind].inc()


class DraftMetrics:
    """Drafts proposed and accepted at each position of the chain, from 1; ``kind`` is "" for those
    of the MTP layer."""

    def __init__(self, num_drafts: int, kind: str = "") -> None:
        labels = _scheduler_labels()
        names = (*labels, "position")
        meaning = "Drafts {} at this position of the chain (1 is the first)."
        drafted = _metric("counter", f"{kind}drafts_total", meaning.format("proposed"), names)
        name = f"accepted_{kind}drafts_total"
        accepted = _metric("counter", name, meaning.format("accepted"), names)
        self._positions = [
            tuple(counter.labels(**labels, position=k) for counter in (drafted, accepted))
            for k in range(1, num_drafts + 1)
        ]

    def add(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Of one step, by position."""
        counts = zip(self._positions, num_drafted, num_accepted, strict=True)
        for (drafted, accepted), of_drafted, of_accepted in counts:
            drafted.inc(of_drafted)
            accepted.inc(of_accepted)


def drafts_per_step() -> Callable[[int], None]:
    """Is told K of an adaptive server's steps."""
    labels = _scheduler_labels()
    meaning, mode = "Tokens that a step drafts for each request.", "mostrecent"
    gauge = _metric("gauge", "drafts_per_step", meaning, tuple(labels), multiprocess_mode=mode)
    return gauge.labels(**labels).set


class PhaseMetrics:
    """A histogram of each phase's time."""

    def __init__(self) -> None:
        labels = _scheduler_labels()
        histogram = _metric(
            "histogram",
            "step_phase_seconds",
            "Time of each phase of a speculative decode step, on the clock of the device.",
            (*labels, "phase"),
            buckets=PHASE_BUCKETS_S,
        )
        self._phases = {phase: histogram.labels(**labels, phase=phase) for phase in PHASES}

    def observe(self, step: StepTimes) -> None:
        for phase, seconds in step.durations.items():
            self._phases[phase].observe(seconds)


def _metric(kind: str, name: str, meaning: str, labels: tuple[str, ...], **options: Any) -> Any:
    # At its import it looks for PROMETHEUS_MULTIPROC_DIR, which SGLang sets before this.
    import prometheus_client as client

    # A deployment may have told SGLang to report through other classes (Ray does).
    collector = resolve_collector_class(STAT_LOGGER_ROLE_SCHEDULER, SchedulerMetricsCollector)
    metric_class = {
        "counter": collector._counter_cls or client.Counter,
        "gauge": collector._gauge_cls or client.Gauge,
        "histogram": collector._histogram_cls or client.Histogram,
    }[kind]
    return metric_class(
        name=f"sglang_ascend:{name}", documentation=meaning, labelnames=labels, **options
    )


def _scheduler_labels() -> dict[str, Any]:
    """Those of SGLang's SchedulerMetricsCollector, less the priority."""
    parallel = get_parallel()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(get_disagg().disaggregation_mode),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    return labels | (get_observability().extra_metric_labels or {})
