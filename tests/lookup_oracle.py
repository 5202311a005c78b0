"""Prompt lookup as a search over a list of tokens."""

from __future__ import annotations


def searched(known: list[int], num_drafts: int, least: int, most: int) -> tuple[list[int], int]:
    """(drafts, equal tokens that they were found by). The longest match first, then the last place;
    drafts are appended as they are found, so that what follows may be drafts."""
    for n in range(most, least - 1, -1):
        for start in range(len(known) - 1, n - 1, -1):
            if known[start - n : start] == known[len(known) - n :]:
                tokens = list(known)
                for j in range(num_drafts):
                    tokens.append(tokens[start + j])
                return tokens[len(known) :], n
    return known[-1:] * num_drafts, 0
