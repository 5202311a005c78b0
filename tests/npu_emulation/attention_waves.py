"""What the two groups of a server with data-parallel attention are asked for, wave by wave."""

from __future__ import annotations

from typing import Any

from npu_emulation.sglang_runs import Wave, prompt, requests

Prompts = list[list[int]]

TEMPERATURE, TOP_P = 0.8, 0.9
PROMPTS = [prompt(length, seed) for seed, length in enumerate((9, 14, 7, 11, 6, 12, 8))]
LENGTH = 10
UNEVEN, IDLE, MIXED, LARGE, PREFILLS = range(5)

# By wave: the prompts of each group.
GROUPS: list[tuple[Prompts, Prompts]] = [
    (PROMPTS[:1], PROMPTS[1:3]),
    ([], PROMPTS[3:4]),
    (PROMPTS[4:5], PROMPTS[1:3]),
    (PROMPTS[5:6], PROMPTS[:3]),
    (PROMPTS[6:], PROMPTS[:5]),
]


def of_group(group: int, prompts: Prompts, num_tokens: int = LENGTH, **sampling: Any) -> Wave:
    asked = requests(prompts, max_new_tokens=num_tokens, **sampling)
    return [request | {"attention_group": group} for request in asked]


def of_both(groups: tuple[Prompts, Prompts], num_tokens: int = LENGTH) -> Wave:
    first, second = groups
    return of_group(0, first, num_tokens) + of_group(1, second, num_tokens)


def in_turn(prompts: Prompts, num_groups: int, num_tokens: int) -> Wave:
    """Each prompt is the next group's."""
    asked = requests(prompts, max_new_tokens=num_tokens)
    return [each | {"attention_group": i % num_groups} for i, each in enumerate(asked)]


WAVES = [
    of_both(GROUPS[UNEVEN]),
    of_both(GROUPS[IDLE]),
    # The first group samples and the second does not.
    of_group(0, GROUPS[MIXED][0], temperature=TEMPERATURE, top_p=TOP_P)
    + of_group(1, GROUPS[MIXED][1]),
    # The second group has more requests than the largest graph holds.
    of_both(GROUPS[LARGE]),
    # Three requests of a group run at once: the last two are prefilled when others have ended.
    of_group(0, GROUPS[PREFILLS][0], 2 * LENGTH) + of_group(1, GROUPS[PREFILLS][1], 3),
]
GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "--max-running-requests", "6")
