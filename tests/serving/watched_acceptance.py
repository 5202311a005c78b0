"""A server whose accepted drafts are written down, and the judgement of its replies."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from acceptance_oracle import AcceptanceOracle, Judgement, Step
from disaggregated import Disaggregated
from launched_server import LaunchedServer, Reply, ServerConfig, Tokens

ROOT = Path(__file__).parents[2]
PARTS = (ROOT / "benchmarks" / "server_parts", Path(__file__).parent / "watched_drafts", ROOT)


def with_parts(config: ServerConfig, *parts: str, **variables: str) -> ServerConfig:
    """`config` with parts of watched_drafts/, which read the variables."""
    variables |= {
        "PYTHONPATH": os.pathsep.join(map(str, PARTS)),
        "BENCHMARK_PARTS": ",".join(parts),
    }
    return replace(config, variables=(*config.variables, *variables.items()))


def watched(config: ServerConfig, folder: Path, *parts: str, **variables: str) -> ServerConfig:
    """`config`, which tells in `folder` what it accepted, and makes the mistake that is asked for
    there."""
    parts = ("record_acceptance", "mistaken_drafts", *parts)
    return with_parts(config, *parts, ACCEPTANCE=str(folder), **variables)


@contextmanager
def mistaken(folder: Path, mistake: str) -> Iterator[None]:
    """The server drafts so, within the block."""
    file = folder / "mistake"
    file.write_text(mistake)
    try:
        yield
    finally:
        file.unlink()


@dataclass(frozen=True)
class Answer:
    """A reply and the steps that made it."""

    prompt: Tokens
    reply: Reply
    steps: list[Step]


def ask(
    server: LaunchedServer | Disaggregated,
    folder: Path,
    prompts: Sequence[Tokens],
    sampling: dict[str, Any],
    concurrency: int,
) -> list[Answer]:
    """One request for each prompt, at most `concurrency` of them at a time. What a reply says of
    itself must be what was written down."""
    replies = server.generate_each(prompts, sampling, concurrency)
    steps = recorded(folder)
    answers = []
    for prompt, reply in zip(prompts, replies, strict=True):
        mine = steps[reply.meta["id"]]
        counts = [step.accepted for step in mine]
        told = reply.meta["spec_correct_drafts_histogram"]
        assert told == [counts.count(n) for n in range(len(told))]
        assert sum(told) == len(counts) == reply.meta["spec_verify_ct"]
        answers.append(Answer(prompt, reply, mine))
    return answers


def recorded(folder: Path) -> dict[str, list[Step]]:
    """By request; every process that decodes must have counted the same."""
    found = []
    # Another process writes these than the steps.
    returns = {key: it for path in folder.glob("*.returns") for key, it in chains_of(path).items()}
    for path in sorted(folder.glob("*.steps")):
        steps, chains = defaultdict(list), chains_of(path.with_suffix(".chains"))
        for line in path.read_text().splitlines():
            name, *numbers = line.split()
            end, accepted = map(int, numbers)
            start = end - accepted - 1
            chain = chains[name, start] if chains else returns.get((name, start), ())
            steps[name].append(Step(start, accepted, *chain))
        found.append(steps)
    assert all(steps == found[0] for steps in found[1:])
    return found[0]


def chains_of(path: Path) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Of a server whose chains differ in length, by request and start: (drafts, verified) of each
    step, and whether it was looked up where it may be. What ran for a request that was retracted
    meanwhile is counted nowhere."""
    chains = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, *numbers = line.split()
        start, drafted, verified, *is_lookup = map(int, numbers)
        chains[name, start] = (drafted, verified, *map(bool, is_lookup))
    return chains


def judge(oracle: AcceptanceOracle, answers: Sequence[Answer]) -> Judgement:
    return Judgement.of_all(
        oracle.judge(
            answer.prompt, answer.reply.tokens, answer.steps, answer.reply.meta["num_retractions"]
        )
        for answer in answers
    )
