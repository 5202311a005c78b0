"""What a served process reports: its classes, tokens, and the counts of each turn of the loop."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Decode iterations that are not steady: the first reads a prefill's result, the second fills
# caches, and in the last full one the end of a request may be read.
WARM_UP, LAST = 2, -1


@dataclass(frozen=True)
class Request:
    input_ids: list[int]
    sampling_params: dict[str, Any]
    bootstrap_room: int | None = None  # where a prefill and a decode server meet for it
    custom_logit_processor: str | None = None
    attention_group: int = 0  # under data-parallel attention: whose request it is


@dataclass
class Iteration:
    """One turn of the scheduler's loop: a batch is launched, the one before is read."""

    wave: int  # of requests, the first is 0
    forward: str  # SGLang's name of the batch's mode
    num_requests: int
    calls: dict[str, int]  # of the runtime: launches, copies, synchronisations
    launched: list[str]  # torch_npu's launches
    kernels: list[str]  # launches of stand-ins, which torch_npu does not make
    host_seconds: float  # without what the device's work took, which a host waits for here


@dataclass
class Report:
    names: dict[str, str]
    tokens: list[list[int]] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    # Of each request, a pair for each verification: tokens in the cache before it, drafts accepted.
    accepted: list[list[list[int]]] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    not_counted: dict[str, int] = field(default_factory=dict)  # launches that need CANN
    left_undone: list[str] = field(default_factory=list)  # calls of CANN that did nothing
    unchecked: list[str] = field(default_factory=list)  # operators without known constraints
    collectives: dict[str, int] = field(default_factory=dict)  # that the device ran, by kind
    other_ranks: list[Report] = field(default_factory=list)
    prefill: Report | None = None  # of the server that prefilled, where it is another

    @classmethod
    def from_json(cls, text: str) -> Report:
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, found: dict[str, Any]) -> Report:
        iterations = [Iteration(**turn) for turn in found["iterations"]]
        other_ranks = [cls._of(other) for other in found["other_ranks"]]
        prefill = found["prefill"] and cls._of(found["prefill"])
        read = {"iterations": iterations, "other_ranks": other_ranks, "prefill": prefill}
        return cls(**found | read)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def steady(self, wave: int = 0) -> Steady:
        return steady([turn for turn in self.iterations if turn.wave == wave])

    def steady_without_requests(self, wave: int) -> Steady:
        """Of a rank that idles while another decodes, and neither prefills."""
        idle = [turn for turn in self.iterations if turn.wave == wave and turn.forward == "IDLE"]
        return _most_frequent([turn for turn in idle if "graph_replays" in turn.calls])


@dataclass(frozen=True)
class Steady:
    """The counts of a decode iteration with every request in it, when none begins or ends."""

    calls: dict[str, int]
    num_kernels: int
    num_iterations: int
    num_alike: int  # of them, those that have just these counts
    host_seconds: list[float] = field(default_factory=list)  # of each of them


def steady(iterations: Sequence[Iteration]) -> Steady:
    """Most often the counts of all such iterations are the same; else the most frequent ones."""
    decodes = [turn for turn in iterations if turn.forward == "DECODE"]
    full = max((turn.num_requests for turn in decodes), default=0)
    return _most_frequent([turn for turn in decodes if turn.num_requests == full])


def _most_frequent(turns: Sequence[Iteration]) -> Steady:
    found = turns[WARM_UP:LAST]
    if not found:
        raise ValueError("no decode iteration was steady: ask for more tokens.")
    counts = Counter((tuple(sorted(turn.calls.items())), len(turn.kernels)) for turn in found)
    (calls, num_kernels), num_alike = counts.most_common(1)[0]
    host_seconds = [turn.host_seconds for turn in found]
    return Steady(dict(calls), num_kernels, len(found), num_alike, host_seconds)
