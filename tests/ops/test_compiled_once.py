"""No kernel that a step launches outside its graphs is compiled under a request: of batches of 1 to
160 requests, at tables of 1 to 320 pages, none asks Triton for a program that the warm-up at start
has not."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from begun import template

from sglang_ascend.ops.attention.tiles import ASCEND

PROGRAM = Path(__file__).with_name("compiled_kernels.py")
# Rows of a request are K + 1, and 1 in draft decodes.
ATTENTION = {
    "gqa_split": 4,  # of either, with splits and without
    "mla_in_parts": 6,  # of 20 heads either, of 40 draft decodes; with splits and without
    "mla_in_memory": 1,  # of 40 heads, K + 1 rows
    "merge_splits": 6,  # of three models, either
}


@cache
def programs(*words: str) -> dict[str, Any]:
    """How many each kernel asks for at start and later."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = template().run([PROGRAM.stem, *words], environment, 300, str(PROGRAM.parent))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_nothing_is_compiled_after_the_warm_up():
    found = programs()
    assert len(found["later"]) == 11
    assert set(found["later"].values()) == {0}
    assert found["splits"] == list(range(1, ASCEND.num_cores + 1))


def test_what_the_warm_up_compiles_does_not_grow_with_the_splits():
    at_start = programs()["at_start"]
    assert at_start == {name: ATTENTION.get(name, 1) for name in at_start}


def test_the_control_specialized_kernels_are_compiled_again():
    assert all(programs("specialized")["later"].values())


@pytest.mark.parametrize(
    ("only", "compiled_later"),
    [(1, {"gqa_split", "mla_in_parts", "merge_splits"}), (7, {"gqa_split", "mla_in_parts"})],
)
def test_the_control_splits_left_out_of_the_start_are_compiled_later(only, compiled_later):
    later = programs(f"splits={only}")["later"]
    assert {name for name, count in later.items() if count} == compiled_later
