"""Invariant: no evaluation prompt is ever trained on, and templated prompts do not repeat."""

import random
from itertools import islice
from pathlib import Path

import pytest

from sglang_ascend.training.generation.outputs import read_prompts
from sglang_ascend.training.generation.prompts import (
    DOMAINS,
    TEMPLATES,
    prompt_key,
    templated_prompt,
    templated_prompts,
)

HELD_OUT = Path(__file__).parents[1] / "data" / "heldout_chat.json"


def test_held_out_prompts_cover_every_domain_eight_times_or_more():
    rows = read_prompts(HELD_OUT)
    assert len(rows) >= 64
    assert len({prompt_key(row["prompt"]) for row in rows}) == len(rows)
    for domain in DOMAINS:
        assert sum(row["domain"] == domain for row in rows) >= 8


def test_no_held_out_prompt_comes_out_of_the_templates():
    held_out = {prompt_key(row["prompt"]) for row in read_prompts(HELD_OUT)}
    rng = random.Random(0)
    drawn = {prompt_key(templated_prompt(rng)) for _ in range(20_000)}
    assert len(drawn) > 5_000
    assert not drawn & held_out


def test_excluded_prompts_are_skipped_and_nothing_repeats():
    first = next(templated_prompts(3, set()))
    prompts = list(islice(templated_prompts(3, {prompt_key(first)}), 500))
    assert first not in prompts
    assert len({prompt_key(prompt) for prompt in prompts}) == 500


def test_every_template_is_filled_completely():
    assert set(TEMPLATES) == set(DOMAINS)
    rng = random.Random(1)
    assert not any("{" in templated_prompt(rng) for _ in range(2_000))


def test_a_prompt_file_of_another_form_is_refused(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('["hello"]')
    with pytest.raises(ValueError, match=r"prompts.json must be a JSON list"):
        read_prompts(path)
