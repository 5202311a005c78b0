"""What a finished request leaves in the cache, where the keys are pairs of tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

PROMPT, OUTPUT = list(range(10)), list(range(50, 56))


def inserted_up_to(up_to: int, *, committed: int, finished=True, pairs=True, stop=6) -> int:
    from sglang_ascend.plugin.requests.prefix_cache import pair_with_last_token

    calls: list[int] = []
    request = SimpleNamespace(
        origin_input_ids=PROMPT,
        output_ids_through_stop=OUTPUT[:stop],
        finished=lambda: finished,
        kv=SimpleNamespace(kv_committed_len=committed),
    )
    cache = SimpleNamespace(tree_core=SimpleNamespace(is_eagle=pairs))
    pair_with_last_token(
        lambda self, req, *, up_to: calls.append(up_to), cache, request, up_to=up_to
    )
    return calls[0]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"up_to": 15, "committed": 15}, 16),  # 15 slots are found by 15 pairs of 16 tokens
        ({"up_to": 15, "committed": 15, "pairs": False}, 15),
        ({"up_to": 15, "committed": 15, "finished": False}, 15),
        (
            {"up_to": 13, "committed": 15, "stop": 3},
            13,
        ),  # accepted behind the stop
        ({"up_to": 10, "committed": 15}, 10),  # thinking is stripped
        ({"up_to": 16, "committed": 16}, 16),
    ],
    ids=["pairs", "no pairs", "running", "stopped within a step", "stripped", "all known"],
)
def test_the_last_token_is_part_of_the_key(loaded_plugins, case, expected):
    assert inserted_up_to(**case) == expected
