"""Three servers, without MTP, with it and with K chosen: the same tokens, the reference's, and how
fast."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ascend.bench.options import MTP
from sglang_ascend.bench.server import ServerProcess
from sglang_ascend.ops.npu.latents import untaken_latents
from sglang_ascend.verify.checks import Check, Progress, sentence_of
from sglang_ascend.verify.reference_tokens import Judged, ReferenceTokens

FLAGS = {"plain": (), "mtp": MTP, "adaptive": (*MTP, "--speculative-adaptive")}
NEW_TOKENS = 32
BATCHES = (1, 8)
# What a forward of float32 and of bf16 differ by is compared with what tells tokens apart.
DTYPES = {"cpu": "float32", "npu": "bfloat16"}
START_TIMEOUT_S = 900
LIMITS = ("--max-total-tokens", "16384", "--max-running-requests", "16")
QUESTIONS = (
    "What is 17 + 25?",
    "Tom has 12 apples and gives away 5. How many are left?",
    "What is 9 times 8?",
    "A book costs 14 dollars. How much do 3 books cost?",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 144 divided by 12?",
    "Name three colours.",
)


@dataclass(frozen=True)
class Setting:
    """What is served, where, and how often it is timed; ``folder`` takes the servers' logs."""

    model: Path
    device: str
    folder: Path
    rounds: int
    name: str

    def arguments(self, name: str) -> list[str]:
        arguments = ["--model-path", str(self.model), "--dtype", DTYPES[self.device], *LIMITS]
        return [*arguments, *FLAGS[name]]


def left_out(setting: Setting) -> list[Check]:
    """A check that judges nothing where the operators of the device do not take the model."""
    config = setting.model / "config.json"
    if setting.device != "npu" or not config.is_file():
        return []
    reason = untaken_latents(json.loads(config.read_text()))
    return [Check(f"{setting.name}: servers", None, note=reason)] if reason else []


Servers = dict[str, ServerProcess]
Reply = dict[str, Any]


@contextmanager
def running(
    setting: Setting, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Servers, list[Check]]]:
    """Those that start, ready, and a check for each; what one cannot the others still show."""
    with ExitStack() as stack:
        started, ready, checks = {}, {}, []
        for name in FLAGS:
            log = setting.folder / f"server-{setting.name}-{name}.log"
            arguments = setting.arguments(name)
            started[name] = ServerProcess(arguments, log, environment=environment)
            stack.callback(started[name].stop)
        for name, server in started.items():
            try:
                server.wait_until_ready(START_TIMEOUT_S)
                ready[name] = server
                checks.append(Check(f"the server starts, {name}", True))
            except RuntimeError as error:
                checks.append(Check(f"the server starts, {name}", False, note=end_of(str(error))))
        yield ready, checks


def end_of(log: str) -> str:
    return " ".join(log[-1500:].split())


def ask(
    server: ServerProcess, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **fields: Any
) -> list[Reply]:
    greedy = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return server.generate(input_ids=prompts, sampling_params=greedy, **fields)


def ask_each(
    servers: Servers, prompts: list[list[int]]
) -> tuple[dict[str, list[Reply]], list[Check]]:
    """Replies, the first ones with log-probabilities, and a failed check of each server that gives
    none: ``servers`` is without it then, and the others still show what they can."""
    replies, failed = dict[str, list[Reply]](), list[Check]()
    for name, server in [*servers.items()]:
        try:
            replies[name] = ask(server, prompts, return_logprob=not replies)
        except Exception as error:
            del servers[name]
            note = f"{sentence_of(error)}; its log ends: {end_of(server.log_tail())}"
            failed.append(Check(f"the server answers, {name}", False, note=note))
    return replies, failed


def steps_of(replies: list[Reply], new_tokens: int = NEW_TOKENS) -> int:
    """Decode forwards of the target for one batch; prefill gives the first token of each."""
    return max(reply["meta_info"].get("spec_verify_ct", 0) for reply in replies) or new_tokens - 1


def check_tokens(servers: Servers, reference: ReferenceTokens) -> list[Check]:
    """A token is the reference's in the served dtype, or one that this dtype does not tell from it.

    Rounding is the reference's own, never the servers': a broken one cannot excuse itself.
    """
    prompts = [reference.prompt(question) for question in QUESTIONS]
    replies, failed = ask_each(servers, prompts)
    if not replies:
        return failed
    measured_by = next(iter(replies))
    judged = {
        name: [
            reference.judge(prompt, reply["output_ids"])
            for prompt, reply in zip(prompts, answers, strict=True)
        ]
        for name, answers in replies.items()
    }
    first = judged[measured_by]
    rounding = statistics.median(tie for reply in first for tie in reply.ties)
    usual = statistics.median(margin for reply in first for margin in reply.margins)
    measured = {
        "usual rounding (nats)": rounding,
        "usual margin (nats)": usual,
        "largest error of a log-probability (nats)": largest_error(replies[measured_by], first),
    }
    margins = "rounding is well below the model's margins"
    checks = [*failed, Check(margins, rounding < usual, measured)]
    for name in judged:
        title = f"greedy tokens against the reference, {name}"
        checks.append(judge_tokens(title, judged[name], reference.has_experts))
    plain = replies.pop("plain", None)
    for name, answers in replies.items():
        checks.append(acceptance(name, answers))
        if plain is not None:
            checks.append(same_replies(name, plain, answers))
    return checks


def same_replies(name: str, plain: list[Reply], drafted: list[Reply]) -> Check:
    pairs = zip(plain, drafted, strict=True)
    same = sum(a["output_ids"] == b["output_ids"] for a, b in pairs)
    measured = {"replies": len(plain), "identical": same}
    note = "another reply is a failure only where a check above says so"
    return Check(f"replies are those without MTP, {name}", None, measured, note)


def largest_error(replies: list[Reply], judged: list[Judged]) -> float:
    """Between a server's log-probabilities of its own tokens and the reference's."""
    return max(
        abs(float(row[0]) - expected)
        for reply, rows in zip(replies, judged, strict=True)
        for row, expected in zip(
            reply["meta_info"]["output_token_logprobs"], rows.logprobs, strict=True
        )
    )


def judge_tokens(name: str, judged: list[Judged], has_experts: bool) -> Check:
    """One token in ten may be a tie's. Beyond a tie is none, or one in 200 of a model of experts:
    rounding may send an earlier token to another expert, which moves logits by more."""
    places = [
        place
        for reply in judged
        for place in zip(reply.gaps, reply.ties, reply.chosen, strict=True)
    ]
    beyond = sum(gap > tie and not chosen for gap, tie, chosen in places)
    in_ties = sum(gap <= tie and not chosen for gap, tie, chosen in places)
    passed = 10 * in_ties <= len(places) and 200 * beyond <= (len(places) if has_experts else 0)
    measured = {
        "tokens": len(places),
        "in a tie": in_ties,
        "beyond a tie": beyond,
        "largest gap (nats)": max(gap for gap, _, _ in places),
    }
    return Check(name, passed, measured)


def acceptance(name: str, replies: list[Reply]) -> Check:
    forwards = sum(reply["meta_info"]["spec_verify_ct"] for reply in replies)
    tokens = sum(len(reply["output_ids"]) - 1 for reply in replies)
    measured = {"acceptance length": tokens / forwards}
    return Check(f"tokens per target forward, {name}", None, measured)


def time_servers(
    servers: Servers, prompts: list[list[int]], batch: int, rounds: int
) -> list[Check]:
    """Alternating rounds; a time is of whole requests, prefill included."""
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    steps: dict[str, float] = {}
    for number in range(-1, rounds):  # the first fills caches
        for name in list(servers) if number % 2 else list(servers)[::-1]:
            start = time.perf_counter()
            replies = ask(servers[name], prompts[:batch])
            elapsed = time.perf_counter() - start
            steps[name] = steps_of(replies)
            if number >= 0:
                seconds[name].append(elapsed)
    checks = []
    for name, times in seconds.items():
        median = statistics.median(times)
        measured = {
            "tokens/s": batch * NEW_TOKENS / median,
            "ms per step": 1e3 * median / steps[name],
        }
        checks.append(Check(f"batch {batch}, {name}", None, measured))
    plain = seconds.pop("plain", None)
    if plain is None:
        return checks
    for name, times in seconds.items():
        ratios = [without / of_round for without, of_round in zip(plain, times, strict=True)]
        measured = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        checks.append(Check(f"batch {batch}, output tokens/s, {name} / plain", None, measured))
    return checks


def check_serving(setting: Setting, progress: Progress) -> list[Check]:
    """Never raises: a server that dies is what was found."""
    if skipped := left_out(setting):
        return skipped
    total, checks = 3 + len(BATCHES), list[Check]()
    try:
        progress("the reference on the CPU", total)
        reference = ReferenceTokens(setting.model, DTYPES[setting.device])
        prompts = [reference.prompt(question) for question in QUESTIONS]
        progress("servers start", total)
        with running(setting) as (servers, started):
            checks += started
            if servers:
                progress("greedy tokens", total)
                checks += check_tokens(servers, reference)
                for batch in BATCHES:
                    progress(f"output tokens/s, batch {batch}", total)
                    checks += time_servers(servers, prompts, batch, setting.rounds)
    except Exception as error:
        checks.append(Check("the servers answer", False, note=sentence_of(error)))
    return [replace(check, name=f"{setting.name}: {check.name}") for check in checks]
