"""How the tests of MTP's step serve on the emulated NPU, and what a steady step may cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_emulation.report import Iteration, Report, Steady
from npu_emulation.sglang_runs import FUSED_ATTENTION, served

MTP = ("--speculative-algorithm", "MTP", "--attention-backend", "ascend")
# Attention is interpreted for as many keys as the context may have: tables are short.
SHORT_CONTEXT = ("--context-length", "256")
# "launches" has graph replays in it, and "event_syncs" the wait for the results.
WAITS_AND_COPIES = ("stream_syncs", "event_syncs", "h2d", "d2h")
MOST_LAUNCHES = 1.3  # of a plain step's


def served_by_mtp(
    folder: Path,
    waves: Sequence[Any],
    *flags: str,
    environ: dict[str, str] | None = None,
    **kwargs: Any,
) -> Report:
    environ = FUSED_ATTENTION | (environ or {})
    return served(folder, waves, (*MTP, *SHORT_CONTEXT, *flags), environ, **kwargs)


def decodes(report: Report, wave: int) -> list[Iteration]:
    turns = report.iterations
    return [turn for turn in turns if turn.wave == wave and turn.forward == "DECODE"]


def tokens_per_step(report: Report) -> float:
    """Mean of all requests; the first token of each is the prefill's."""
    num_drawn = sum(len(output) - 1 for output in report.tokens)
    steps = [turn for turn in report.iterations if turn.forward == "DECODE"]
    return num_drawn / sum(turn.num_requests for turn in steps)


def check_budget(step: Steady, plain: Steady) -> None:
    """No wait for a stream, no synchronous copy, no more waits for events than a plain step."""
    assert step.num_alike == step.num_iterations
    found = {name: step.calls.get(name, 0) for name in WAITS_AND_COPIES}
    assert found.pop("event_syncs") <= plain.calls["event_syncs"]
    assert set(found.values()) == {0}, found
    num_launches = step.calls["launches"] + step.num_kernels
    assert num_launches <= MOST_LAUNCHES * (plain.calls["launches"] + plain.num_kernels)
