"""Acceptance of greedy chain speculation, simulated exactly from teacher-forced rows.

A chain is cut at its first wrong draft, so every row that counts saw only the target's tokens:
teacher forcing on the target's own greedy output gives the very drafts that serving would make.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_ascend.bench.figures.lookup import accepted_counts, lookup_matches, loops
from sglang_ascend.bench.figures.ratios import middle
from sglang_ascend.speculative.vocabulary.context import unlisted_context
from sglang_ascend.training.interface import ChainLayer, run_chain

Tensor = torch.Tensor


@dataclass(frozen=True)
class Output:
    """One greedy output: tokens [n] with the prompt's first `prompt_length`, hidden [n, size]."""

    domain: str
    tokens: Tensor
    prompt_length: int
    hidden: Tensor


def draft_matches(
    layer: ChainLayer,
    output: Output,
    embedding: Tensor,
    head: Tensor,
    num_steps: int,
    draft_ids: Tensor | None = None,
    with_context: bool = True,
) -> list[list[bool]]:
    """matches[i][k]: whether step k + 1 from slot i drafts the token that the target emits.

    Slot i is drafted from after the target emitted token i + 1; drafts past the end are wrong.
    `draft_ids` (int64, ascending) restricts the drafts to these tokens, `with_context` joined by
    those of prompt and reply so far.
    """
    device = head.device
    hidden, tokens = output.hidden[None].to(device).float(), output.tokens.to(device)
    with torch.inference_mode():
        chain = run_chain(layer, hidden, tokens[None], embedding, num_steps)
        length = len(output.tokens)
        matches = torch.zeros(length - 1, num_steps, dtype=torch.bool)
        for step, states in enumerate(chain, start=1):
            slots = range(output.prompt_length - 1, length - step - 1)
            if not slots:
                continue
            logits = F.linear(states[0, slots.start : slots.stop], head)
            if draft_ids is not None:
                allowed = _allowed(output.tokens, slots, draft_ids, len(head), with_context)
                logits = logits.where(allowed.to(device), -torch.inf)
            drafts = logits.argmax(-1).cpu()
            wanted = output.tokens[slots.start + step + 1 :]
            matches[slots.start : slots.stop, step - 1] = drafts == wanted
    return matches.tolist()


def _allowed(
    tokens: Tensor, slots: range, draft_ids: Tensor, vocab_size: int, with_context: bool
) -> Tensor:
    """Which tokens a draft from each slot can be, bool [slots, vocab_size]."""
    allowed = torch.zeros(len(slots), vocab_size, dtype=torch.bool)
    allowed[:, draft_ids] = True
    for row, slot in enumerate(slots if with_context else ()):
        allowed[row, unlisted_context(tokens[: slot + 2], draft_ids)] = True
    return allowed


def is_looping(output: Output) -> bool:
    """Whether more than a quarter of the reply's 4-grams are repetitions."""
    return loops(output.tokens[output.prompt_length :].tolist())


def evaluate(
    layer: ChainLayer,
    outputs: list[Output],
    embedding: Tensor,
    head: Tensor,
    num_steps: int = 3,
    draft_ids: Tensor | None = None,
    with_context: bool = True,
) -> dict:
    """Acceptance length (tokens per target forward), per domain and overall, loops apart."""

    def drafts(output: Output) -> list[int]:
        table = draft_matches(layer, output, embedding, head, num_steps, draft_ids, with_context)
        return accepted_counts(table, output.prompt_length)

    def lookup(output: Output) -> list[int]:
        table = lookup_matches(output.tokens.tolist(), num_steps)
        return accepted_counts(table, output.prompt_length)

    straight = [output for output in outputs if not is_looping(output)]
    looping = [output for output in outputs if is_looping(output)]
    report = {"all": _figures(straight, drafts, lookup, num_steps, outputs)}
    by_domain: dict[str, list[Output]] = defaultdict(list)
    for output in straight:
        by_domain[output.domain].append(output)
    for domain in sorted({output.domain for output in outputs}):
        every = [output for output in outputs if output.domain == domain]
        report[domain] = _figures(by_domain[domain], drafts, lookup, num_steps, every)
    report["looping outputs"] = _figures(looping, drafts, lookup, num_steps, looping)
    return report


def _figures(
    outputs: list[Output],
    drafts: Callable[[Output], list[int]],
    lookup: Callable[[Output], list[int]],
    num_steps: int,
    every: list[Output],
) -> dict:
    counts = [row for row in map(drafts, outputs) if row]
    flat = [count for row in counts for count in row]
    if not flat:
        return {"outputs": 0, "loop_share": _loop_share(every)}
    baseline = [count + 1 for output in outputs for count in lookup(output)]
    low, high = _interval(counts)
    return {
        "acceptance_length": round(1 + sum(flat) / len(flat), 3),
        "interval_95": [round(low, 3), round(high, 3)],
        "conditional": [round(share, 3) for share in conditional(flat, num_steps)],
        "lookup_baseline": round(sum(baseline) / len(baseline), 3),
        "outputs": len(outputs),
        "verifies": len(flat),
        "loop_share": _loop_share(every),
    }


def conditional(counts: list[int], num_steps: int) -> list[float]:
    """P(draft k is accepted | those before it were), k from 1, of the drafts that each verify
    accepted; 0 where none is ever asked."""
    reached = [sum(count >= step for count in counts) for step in range(num_steps + 1)]
    return [reached[step + 1] / max(1, reached[step]) for step in range(num_steps)]


def _loop_share(outputs: list[Output]) -> float:
    return round(sum(map(is_looping, outputs)) / max(1, len(outputs)), 3)


def _interval(counts: list[list[int]]) -> tuple[float, float]:
    """95 % bootstrap interval of the acceptance length, outputs drawn with replacement."""
    rng = random.Random(0)
    totals = [(sum(row), len(row)) for row in counts]
    samples = (rng.choices(totals, k=len(totals)) for _ in range(1000))
    return middle(1 + sum(s for s, _ in sample) / sum(n for _, n in sample) for sample in samples)
