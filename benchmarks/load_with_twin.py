"""Many clients at once: each request's end is counted, each greedy one is asked of a twin too."""

from __future__ import annotations

import math
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from threading import Lock
from typing import Any

import requests

from benchmarks.load_client import LoadClient, Outcome, Reply
from benchmarks.request_mix import Job, RequestMix

IDLE_TIMEOUT_S = 60
MAX_PROBLEMS = 20
TWIN_CONCURRENCY = 16


class MixedLoad:
    """Sends a mix from many clients at once; each finished greedy request goes to the twin too."""

    def __init__(
        self,
        mix: RequestMix,
        client: LoadClient,
        twin: LoadClient,
        concurrency: int,
        most_requests: float = math.inf,
    ) -> None:
        self.mix, self.client, self.twin = mix, client, twin
        self.concurrency, self.most_requests = concurrency, most_requests
        self.ends: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()
        self.mismatches: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.idle: list[dict[str, int]] = []
        self._indices = count()
        self._lock = Lock()
        self._twins = ThreadPoolExecutor(TWIN_CONCURRENCY)
        self._compared: list[Future[None]] = []

    @property
    def goes_on(self) -> bool:
        is_bad = len(self.problems) + len(self.mismatches) >= MAX_PROBLEMS
        return not is_bad and sum(self.ends.values()) < self.most_requests

    def run(self, seconds: float) -> None:
        """All clients, each with its next request as soon as its last one has ended."""
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(self.concurrency) as pool:
            clients = [pool.submit(self._one_client, deadline) for _ in range(self.concurrency)]
            for client in clients:
                client.result()

    def _one_client(self, deadline: float) -> None:
        while time.monotonic() < deadline and self.goes_on:
            job = self.mix.job(next(self._indices))
            outcome = self.client.send(job)
            with self._lock:
                self._count(outcome)
            if outcome.end == "finished" and job.is_greedy:
                self._compared.append(self._twins.submit(self._compare, job, outcome.replies))

    def _count(self, outcome: Outcome) -> None:
        self.ends[outcome.end] += 1
        self.kinds[outcome.job.kind] += 1
        self.sums["output_tokens"] += outcome.num_tokens
        self.sums["cached_tokens"] += outcome.cached_tokens
        self.sums["radix_hits"] += outcome.cached_tokens > 0
        if outcome.num_verified:
            self.sums["verified"] += outcome.num_verified
            self.sums["decoded"] += outcome.num_tokens - len(outcome.replies)
        if outcome.problem:
            self.problems.append(f"{outcome.job.name}: {outcome.problem}")

    def _compare(self, job: Job, found: list[Reply]) -> None:
        expected = self.twin.twin(job)
        with self._lock:
            self.sums["compared"] += 1
            if expected.problem:
                self.problems.append(f"twin of {job.name}: {expected.problem}")
            elif expected.replies != found:
                self.mismatches.append(
                    {
                        "index": job.index,
                        "kind": job.kind,
                        "body": job.body,
                        "expected": [asdict(reply) for reply in expected.replies],
                        "found": [asdict(reply) for reply in found],
                    }
                )

    def finish_comparing(self) -> None:
        for comparison in self._compared:
            comparison.result()
        self._twins.shutdown()

    def describe(self) -> str:
        ends = ", ".join(f"{number} {end}" for end, number in self.ends.most_common())
        return (
            f"{ends}; {self.sums['compared']} of {len(self._compared)} compared, "
            f"{len(self.mismatches)} differ; {len(self.problems)} problems"
        )

    def check_idle(self) -> None:
        """Every KV slot that no cached prefix holds is free again; then the prefixes go, too."""
        flush = f"{self.client.url}/flush_cache?timeout={IDLE_TIMEOUT_S}"
        try:
            state = _state_at_rest(self.client.url)
            requests.post(flush, timeout=2 * IDLE_TIMEOUT_S).raise_for_status()
            state["used_after_flush"] = _state_at_rest(self.client.url)["used"]
        except requests.RequestException as error:
            self.problems.append(f"the idle server does not answer: {error}"[:500])
            return
        self.idle.append(state)


def _state_at_rest(url: str) -> dict[str, int]:
    """Requests and KV slots in use once nothing is sent; polled until there are none.

    An idle scheduler reports every second: only what it said after this call counts.
    """
    called, deadline = time.time(), time.monotonic() + IDLE_TIMEOUT_S
    while True:
        load = requests.get(f"{url}/v1/loads", timeout=IDLE_TIMEOUT_S).json()["loads"][0]
        state = {
            "running": load["num_running_reqs"],
            "waiting": load["num_waiting_reqs"],
            "used": load["num_used_tokens"],
        }
        if load["timestamp"] > called and not any(state.values()):
            return state
        if time.monotonic() > deadline:
            raise requests.Timeout(f"not at rest after {IDLE_TIMEOUT_S} s: {state}")
        time.sleep(0.2)
