"""The same prompts to every server, one server busy at a time, and what each round showed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from sglang_ascend.bench.client import Client, Reply
from sglang_ascend.bench.figures.acceptance import Acceptance
from sglang_ascend.bench.figures.lookup import accepted_counts, lookup_matches, loops

TASKS = Path(__file__).with_name("tasks.json")
# Drafts of the lookup that stands beside the servers', whatever their own number is.
LOOKUP_DRAFTS = 3

Server = TypeVar("Server")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Measured:
    """Replies to prompts that were sent at once, and the time of them all."""

    seconds: float
    replies: Sequence[Reply]

    @property
    def num_tokens(self) -> int:
        return sum(reply.num_tokens for reply in self.replies)

    @property
    def rate(self) -> float:
        """Output tokens/s, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def acceptance(self) -> Acceptance | None:
        """None of a server without speculation."""
        found = [reply.acceptance for reply in self.replies if reply.acceptance]
        return sum(found[1:], found[0]) if found else None

    @property
    def accept_length(self) -> float:
        """Tokens per forward of the target; 1 without speculation."""
        return self.acceptance.length if self.acceptance else 1.0


@dataclass(frozen=True)
class Sample:
    """What one server gave in one round, as a report keeps it."""

    tok_s: float
    seconds: float
    tokens: int
    histogram: list[int] | None  # of accepted drafts; None without speculation
    lookup_histogram: list[int]  # of prompt lookup on the same replies
    loops: bool  # some reply does

    @classmethod
    def of(cls, measured: Measured) -> Sample:
        lookup = [0] * (LOOKUP_DRAFTS + 1)
        for reply in measured.replies:
            tokens = [*reply.prompt_ids, *reply.token_ids]
            matches = lookup_matches(tokens, LOOKUP_DRAFTS)
            for accepted in accepted_counts(matches, len(reply.prompt_ids)):
                lookup[accepted] += 1
        acceptance = measured.acceptance
        return cls(
            measured.rate,
            measured.seconds,
            measured.num_tokens,
            list(acceptance.histogram) if acceptance else None,
            lookup,
            any(loops(reply.token_ids) for reply in measured.replies),
        )

    @property
    def acceptance(self) -> Acceptance | None:
        return Acceptance(tuple(self.histogram)) if self.histogram else None


@dataclass(frozen=True)
class Round:
    """The prompts ``first`` to ``first + batch - 1`` of a task, on every server.

    ``prompts`` is the SHA-256 of their JSON: reports are compared where they had the same.
    """

    task: str
    first: int
    prompts: str
    samples: dict[str, Sample]

    @property
    def loops(self) -> bool:
        return any(sample.loops for sample in self.samples.values())

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> Round:
        samples = {name: Sample(**sample) for name, sample in row["samples"].items()}
        return cls(row["task"], row["first"], row["prompts"], samples)


def measure(
    client: Client, prompts: Sequence[str], max_new_tokens: int, temperature: float = 0.0
) -> Measured:
    """Replies to all prompts, sent at once; greedy ones at temperature 0."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        ask = partial(client.chat, max_new_tokens=max_new_tokens, temperature=temperature)
        replies = list(pool.map(ask, prompts))
    return Measured(time.perf_counter() - start, replies)


def alternate(
    servers: Mapping[str, Server],
    measure_one: Callable[[Server, Sequence[str]], Result],
    groups: Sequence[Sequence[str]],
) -> Iterator[dict[str, Result]]:
    """What each server gives for each group of prompts, after the first one to warm up."""
    for server in servers.values():
        measure_one(server, groups[0])
    for number, group in enumerate(groups):
        # Whoever goes second may meet a warmer machine: swap the order every round.
        order = list(servers) if number % 2 == 0 else list(servers)[::-1]
        results = {name: measure_one(servers[name], group) for name in order}
        yield {name: results[name] for name in servers}


def read_tasks(path: Path = TASKS) -> dict[str, list[str]]:
    """Prompts of each task, from a JSON list of {"domain", "prompt"}.

    Raises:
        ValueError: the file holds anything else.
    """
    tasks: dict[str, list[str]] = {}
    try:
        for row in json.loads(path.read_text(encoding="utf-8-sig")):
            domain, prompt = row["domain"], row["prompt"]
            if not isinstance(domain, str) or not isinstance(prompt, str) or not prompt.strip():
                raise TypeError
            tasks.setdefault(domain, []).append(prompt)
    except (TypeError, KeyError, ValueError):
        tasks = {}
    if not tasks:
        raise ValueError(f'{path} must be a JSON list of {{"domain": …, "prompt": …}} objects.')
    return tasks


def run_tasks(
    clients: Mapping[str, Client],
    tasks: Mapping[str, Sequence[str]],
    max_new_tokens: int,
    batch: int = 1,
    temperature: float = 0.0,
) -> Iterator[Round]:
    """Every task's prompts once, ``batch`` of them at a time; the last may be fewer."""
    places = [
        (task, first) for task, prompts in tasks.items() for first in range(0, len(prompts), batch)
    ]
    groups = [tasks[task][first : first + batch] for task, first in places]
    results = alternate(
        clients, lambda client, group: measure(client, group, max_new_tokens, temperature), groups
    )
    for (task, first), group, result in zip(places, groups, results, strict=True):
        samples = {name: Sample.of(one) for name, one in result.items()}
        yield Round(task, first, sha256(json.dumps(group).encode()).hexdigest(), samples)
