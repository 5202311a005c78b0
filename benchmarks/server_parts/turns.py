"""Policies of drafts, and a server without speculation, that take turns every few steps.

A server with --speculative-adaptive runs each fixed K and its own choice by turns, on the same
requests. Between each two of them a second server, without speculation, has a turn on copies of
them. Those of its steps count that are at the context where the turn before has ended; then it goes
on by half of what the next turn is going to emit. So the two turns of the plain server around one
of the other's are at contexts that are shorter and longer by the same. While one of the two has a
turn the other one waits. What a machine does to all of them within a second is no difference.

$MAX_FIXED is the largest K that has turns. $TURNS names the folder of ``TurnState``; each step that
counts is a line there, in drafts.jsonl or plain.jsonl. The first steps of a turn do not count: the
very first verifies the chain of the turn before, and runs the MTP layer on what that has skipped,
and some find the processor's caches as the other server left them.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any, TextIO

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from benchmarks.turn_state import ADAPTIVE, PLAIN, UNCOUNTED, TurnState
from sglang_ascend.plugin.requests.unsettled import Unsettled
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts

FOLDER = Path(os.environ["TURNS"])
STEPS_OF_A_TURN, MAX_FIXED = (int(os.environ[n]) for n in ("STEPS_OF_A_TURN", "MAX_FIXED"))
# The server's own choice has longer turns: it learns from steps near to each other.
OWN_TURNS = 4
STEPS = "sglang_ascend.plugin.mtp.adaptive.steps.AdaptiveSteps"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class FixedDrafts(AdaptiveDrafts):
    """Chooses K, and learns nothing."""

    def __init__(self, max_drafts: int, num_drafts: int) -> None:
        super().__init__(max_drafts)
        self.in_force = num_drafts

    def choose(self, *args: Any) -> int:
        return self.in_force

    def start_anew(self, *args: Any) -> None: ...
    def record_time(self, *args: Any) -> None: ...
    def record_acceptance(self, *args: Any) -> None: ...


def share_a_core() -> None:
    """Of the thread that computes: the two servers never compute at once, and what else this
    machine runs may slow one of its cores for minutes."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def context_of(batch: Any) -> float:
    """Cached tokens of a request, on average."""
    return sum(req.kv.kv_committed_len for req in batch.reqs) / len(batch.reqs)


def _steps_of(name: str) -> int:
    return UNCOUNTED + STEPS_OF_A_TURN * (OWN_TURNS if name == ADAPTIVE else 1)


class Step:
    """A line of the file, once its time and the drafts that it kept are known."""

    def __init__(self, out: TextIO, policy: Any, counts: bool, **known: Any) -> None:
        self._out, self.policy, self._counts, self._known = out, policy, counts, known
        self.begun = time.perf_counter()
        self.choosing = 0.0  # seconds
        self.telling = 0.0  # seconds that the benchmark took itself

    def tell(self, **known: Any) -> None:
        self._known |= known
        if self._counts and {"seconds", "kept"} <= self._known.keys():
            self._out.write(json.dumps({"begun": self.begun, **self._known}) + "\n")

    def end(self) -> None:
        seconds = time.perf_counter() - self.begun - self.telling
        self.tell(seconds=seconds, choosing=self.choosing)


class DraftTurns:
    """In place of a server's policy: each K's and its own, in random order, and behind each of them
    a turn of the plain server.

    Outside turns the server chooses by itself, and learns what steps cost only while it is alone:
    else the plain server may compute on the same core. Of its own turns it learns the steps that
    count.
    """

    def __init__(self) -> None:
        self.state = TurnState(FOLDER)
        self.out = (FOLDER / "drafts.jsonl").open("a", buffering=1)
        self.policies: dict[str, AdaptiveDrafts] = {}
        self.ahead: list[str] = []
        self.name, self.left, self.uncounted = ADAPTIVE, 0, 0
        self.is_new = False  # no turn of its own choice has begun since the prompts
        self.came_to: int | None = None  # tokens of a request at the last turn's start, if any
        self.plain_came_to = 0
        self.emitted: dict[str, int] = {}  # tokens of a request in a policy's last turn
        self.between = 0  # steps since its own choice
        self.last: Step | None = None
        self.unsettled = Unsettled[Step]()

    def prefill(self, original: Any, adaptive: Any, *args: Any) -> Any:
        """Around ``AdaptiveSteps.prefill``."""
        if not self.policies:
            share_a_core()
            most = adaptive.policy.max_drafts
            fixed = {f"K = {k}": FixedDrafts(most, k) for k in range(MAX_FIXED + 1)}
            self.policies = {**fixed, ADAPTIVE: adaptive.policy}
        if self.left > 0:
            self.ahead.append(self.name)  # the last reply's end cut its turn short
        self.is_new, self.came_to, self.last, self.left = True, None, None, 0
        return original(adaptive, *args)

    def begin(self, original: Any, adaptive: Any, batch: Any, *args: Any) -> tuple[int, int]:
        """Around ``AdaptiveSteps.begin``."""
        if self.last is not None:
            self.last.end()
        in_turn, context = self.state.counts(batch), context_of(batch)
        if in_turn and self.left == 0:
            self._next_turn(round(context))
            self._take_turn(adaptive, len(batch.reqs), context)
        elif not in_turn:
            adaptive.policy = self.policies[ADAPTIVE]
            if not self.state.is_alone:
                adaptive._timed = None
        self.left -= in_turn
        known = {"name": self.name, "cycle": self.state.cycle, "chain": adaptive.in_chains}
        known |= {"requests": len(batch.reqs), "context": context}
        step = Step(self.out, adaptive.policy, in_turn and self.uncounted == 0, **known)
        begun = time.perf_counter()
        verified, drafted = original(adaptive, batch, *args)
        step.choosing += time.perf_counter() - begun
        if in_turn and self.uncounted > 0:
            adaptive._timed = None  # it finds the caches as the plain server left them
        self.uncounted -= self.uncounted > 0
        step.tell(drafts=drafted)
        self.last = step
        self.unsettled.append(len(batch.reqs), step)
        return verified, drafted

    def _next_turn(self, context: int) -> None:
        """Behind one of the plain server."""
        self.state.wait_for_plain()
        if self.came_to is None:
            middle, self.plain_came_to = context + _steps_of(PLAIN) // 2, context
        else:
            middle, self.emitted[self.name] = context, context - self.came_to
        self.came_to = context
        is_new_cycle = not self.ahead
        if is_new_cycle:
            self.ahead = list(self.policies)
            random.shuffle(self.ahead)
        self.name = self.ahead.pop()
        end = context + self.emitted.get(self.name, _steps_of(self.name)) // 2
        self.state.give_plain_a_turn(middle, end)
        self.between += end - self.plain_came_to
        self.plain_came_to = end
        if is_new_cycle:
            self.state.next_cycle()

    def _take_turn(self, adaptive: Any, batch_size: int, context: float) -> None:
        self.left = _steps_of(self.name)
        self.uncounted = UNCOUNTED
        adaptive.policy = self.policies[self.name]
        adaptive._timed = None  # the step before was another policy's
        if self.name != ADAPTIVE:
            self.between += self.left
            return
        if self.is_new:
            adaptive.policy.start_anew(batch_size, context)
        self.is_new = False
        predicted = adaptive.policy.speedups(batch_size, context)
        # The others' turns lie between, in which the machine went on: to a policy that is not told
        # it would seem to jump.
        adaptive.policy.costs.num_steps += self.between
        self.between = 0
        self.out.write(json.dumps({"predicted": predicted}) + "\n")

    def settle(self, original: Any, adaptive: Any, accepted: Any, *args: Any) -> Any:
        """Around ``AdaptiveSteps.settle``: what a policy's steps accept no other one learns."""
        began = time.perf_counter()
        step = self.unsettled.settle(len(accepted))
        if step is None:
            return original(adaptive, accepted, *args)
        drafts = range(1, step.policy.max_drafts + 1)
        step.tell(kept=[sum(n >= draft for n in accepted) for draft in drafts])
        now, adaptive.policy, settling = adaptive.policy, step.policy, time.perf_counter()
        try:
            return original(adaptive, accepted, *args)
        finally:
            adaptive.policy = now
            if self.last is not None:
                self.last.choosing += time.perf_counter() - settling
                self.last.telling += settling - began


class PlainTurns:
    """The server without speculation, which decodes in its turns only."""

    def __init__(self) -> None:
        self.state = TurnState(FOLDER)
        self.out = (FOLDER / "plain.jsonl").open("a", buffering=1)
        self.left = self.uncounted = 0
        self.counts_from = 0.0  # cached tokens of a request
        self.last: Step | None = None

    def run_batch(self, original: Any, scheduler: Any, batch: Any, *args: Any) -> Any:
        """Around ``Scheduler.run_batch``."""
        if self.last is not None:
            self.last.end()
        self.last = None
        if not batch.forward_mode.is_decode():
            share_a_core()
            self.left = 0
            return original(scheduler, batch, *args)
        in_turn, context = self.state.counts(batch), context_of(batch)
        if in_turn and self.left == 0 and context >= self.state.end:
            self.state.wait_for_turn()
            self.left, self.uncounted = STEPS_OF_A_TURN, UNCOUNTED
            # Of the other server's turns the steps that count are so much behind the middle.
            self.counts_from = self.state.middle + (UNCOUNTED - STEPS_OF_A_TURN) / 2
        counts = in_turn and self.uncounted == 0 and self.left > 0 and context >= self.counts_from
        self.uncounted -= self.uncounted > 0
        self.left -= counts
        if counts:
            known = {"name": PLAIN, "cycle": self.state.cycle, "chain": 0, "kept": [], "drafts": 0}
            known |= {"requests": len(batch.reqs), "context": context}
            self.last = Step(self.out, None, True, **known)
        return original(scheduler, batch, *args)


def install() -> None:
    if os.environ["BENCHMARK_ROLE"] == PLAIN:
        HookRegistry.register(f"{SCHEDULER}.run_batch", PlainTurns().run_batch, HookType.AROUND)
        return
    turns = DraftTurns()
    for name in ("prefill", "begin", "settle"):
        HookRegistry.register(f"{STEPS}.{name}", getattr(turns, name), HookType.AROUND)
