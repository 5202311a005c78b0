"""What a worker watches of itself, as --enable-metrics and SGLANG_ASCEND_TRACE ask for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sglang.srt.runtime_context import get_device, get_observability, get_parallel

from sglang_ascend import env
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.mtp.ranks import is_first_rank
from sglang_ascend.plugin.observability.device_clock import DeviceClock
from sglang_ascend.plugin.observability.metrics import (
    AcceptanceMetrics,
    DraftMetrics,
    PhaseMetrics,
    drafts_per_step,
)
from sglang_ascend.speculative.acceptance_counts import AcceptanceCounts
from sglang_ascend.speculative.acceptance_watchdog import AcceptanceWatchdog
from sglang_ascend.speculative.timeline import Clock, HostClock, StepTimeline, StepTimes
from sglang_ascend.speculative.trace_file import TraceFile


def make_watchdog(num_drafts: int) -> AcceptanceWatchdog | None:
    """One for each replica, whose ranks all see the same acceptance."""
    if not is_first_rank():
        return None
    if get_observability().enable_metrics:
        return AcceptanceWatchdog(num_drafts, AcceptanceMetrics().change)
    return AcceptanceWatchdog(num_drafts)


def make_acceptance_counts(num_drafts: int) -> AcceptanceCounts | None:
    """As the watchdog: one for each replica."""
    return _make_counts(num_drafts, "", "Drafts accepted by position")


def make_lookup_counts(num_drafts: int) -> AcceptanceCounts | None:
    """As those of the MTP layer's drafts."""
    return _make_counts(num_drafts, "lookup_", "Lookup drafts accepted by position")


def _make_counts(num_drafts: int, kind: str, what: str) -> AcceptanceCounts | None:
    if not is_first_rank():
        return None
    observability = get_observability()
    counts = partial(AcceptanceCounts, num_drafts, observability.decode_log_interval, what=what)
    return counts(DraftMetrics(num_drafts, kind).add) if observability.enable_metrics else counts()


def make_timeline() -> StepTimeline | None:
    """None where nobody asks for one. OSError if the trace cannot be written."""
    observability = get_observability()
    sinks: list[Callable[[StepTimes], None]] = []
    # As SGLang's scheduler: one rank of a replica, unless all are asked for.
    if observability.enable_metrics and (
        is_first_rank() or observability.enable_metrics_for_all_schedulers
    ):
        sinks.append(PhaseMetrics().observe)
    folder = env.TRACE.get()
    if folder is not None:
        sinks.append(TraceFile(folder, _process_name()).write)
    return StepTimeline(sinks, make_clock()) if sinks else None


def make_clock() -> Clock:
    """By which a step's parts take as long as they do on this device."""
    device = get_device().device
    return DeviceClock(device) if device_profile().launches_ahead else HostClock()


def make_draft_gauge() -> Callable[[int], None]:
    """Told every K that comes into force."""
    if not (is_first_rank() and get_observability().enable_metrics):
        return lambda num_drafts: None
    return drafts_per_step()


def _process_name() -> str:
    parallel = get_parallel()
    replica = "" if parallel.dp_rank is None else f" DP{parallel.dp_rank}"
    return f"sglang scheduler{replica} TP{parallel.tp_rank}"
