"""What a reply's own tokens tell: whether it loops, and how many drafts prompt lookup gives."""

from __future__ import annotations

from collections.abc import Sequence

LOOP_SHARE = 0.25


def accepted_counts(matches: list[list[bool]], prompt_length: int) -> list[int]:
    """Accepted drafts of every verify step, from the first reply token to the end.

    The prefill emits token `prompt_length`; each verify then emits its accepted drafts and one
    more token. Verifies whose chain reaches past the output's end are left out.
    """
    num_steps = len(matches[0]) if matches else 0
    counts, slot = [], prompt_length - 1
    while slot < len(matches) - num_steps:
        accepted = 0
        while accepted < num_steps and matches[slot][accepted]:
            accepted += 1
        counts.append(accepted)
        slot += accepted + 1
    return counts


def lookup_matches(tokens: Sequence[int], num_steps: int, gram: int = 2) -> list[list[bool]]:
    """matches[i][k]: whether prompt lookup, which copies what followed the last earlier equal
    n-gram, finds token i + k + 2 as its draft k + 1, when tokens 0 .. i + 1 are known."""
    matches = []
    latest: dict[tuple[int, ...], int] = {}
    for slot in range(len(tokens) - 1):
        known = slot + 2  # tokens 0..slot+1 are known when slot is drafted from
        start = latest.get(tuple(tokens[known - gram : known])) if known >= gram else None
        row = []
        for step in range(num_steps):
            source, target = (start or 0) + step, known + step
            row.append(
                start is not None
                and source < known
                and target < len(tokens)
                and tokens[source] == tokens[target]
            )
        matches.append(row)
        latest[tuple(tokens[known - gram : known])] = known
    return matches


def repeat_share(tokens: Sequence[int], gram: int = 4) -> float:
    """Share of n-grams that occurred before in `tokens`."""
    grams = [tuple(tokens[i : i + gram]) for i in range(len(tokens) - gram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loops(tokens: Sequence[int]) -> bool:
    """Whether more than a quarter of a reply's 4-grams are repetitions."""
    return repeat_share(tokens) > LOOP_SHARE
