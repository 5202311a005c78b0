"""Invariant: no evaluation prompt is ever trained on, and templated prompts do not repeat."""

import random
from itertools import islice
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import sglang_ascend
from sglang_ascend.training.generation import word_forms
from sglang_ascend.training.generation.prompt_files import read_prompts
from sglang_ascend.training.generation.prompts import (
    DOMAINS,
    TEMPLATES,
    prompt_key,
    templated_prompt,
    templated_prompts,
    vocabulary_words,
)

HELD_OUT = Path(__file__).parents[1] / "data" / "heldout_chat.json"
TOPICS = ("oak", "guitar", "pizza", "zyzzyva")
TASKS = Path(sglang_ascend.__file__).parent / "bench" / "tasks.json"


def test_held_out_prompts_are_of_the_templates_domains_eight_or_more_of_each():
    rows = read_prompts(HELD_OUT)
    assert len(rows) >= 64
    assert len({prompt_key(row["prompt"]) for row in rows}) == len(rows)
    for domain in {row["domain"] for row in rows}:
        assert domain in DOMAINS
        assert sum(row["domain"] == domain for row in rows) >= 8


def test_no_prompt_held_out_or_of_the_benchmark_comes_out_of_the_templates():
    rows = [*read_prompts(HELD_OUT), *read_prompts(TASKS)]
    held_out = {prompt_key(row["prompt"]) for row in rows}
    rng = random.Random(0)
    for topics, least in (((), 5_000), (TOPICS, 12_000)):
        drawn = {prompt_key(templated_prompt(rng, topics=topics)) for _ in range(20_000)}
        assert len(drawn) > least
        assert not drawn & held_out


def test_excluded_prompts_are_skipped_and_nothing_repeats():
    first = next(templated_prompts(3, set()))
    prompts = list(islice(templated_prompts(3, {prompt_key(first)}), 500))
    assert first not in prompts
    assert len({prompt_key(prompt) for prompt in prompts}) == 500


def test_topics_are_words_of_the_targets_vocabulary_too():
    tokens = ["Ġphotosynthesis", "photosynthesis", "▁Paris", "ĠPARIS", "Ġrain", "Ġdon't", None]
    tokenizer = MagicMock(convert_ids_to_tokens=lambda ids: [tokens[one] for one in ids])
    tokenizer.__len__.return_value = len(tokens)
    assert vocabulary_words(tokenizer) == ["photosynthesis", "Paris"]


@pytest.mark.parametrize("domain", sorted({*DOMAINS} - {"chinese", "maths"}))
def test_requests_are_made_of_any_words_too_where_there_are_some(domain):
    rng = random.Random(0)
    drawn = [templated_prompt(rng, domain, topics=["zyzzyva"]) for _ in range(400)]
    assert 120 < sum("zyzzyva" in prompt.lower() for prompt in drawn) < 380
    assert not any("zyzzyva" in templated_prompt(rng, domain) for _ in range(400))


def test_every_template_and_form_is_filled_completely():
    assert set(TEMPLATES) == set(DOMAINS) >= set(word_forms.TEMPLATES)
    rng = random.Random(1)
    for topics in ((), TOPICS):
        drawn = [templated_prompt(rng, topics=topics) for _ in range(20_000)]
        assert not any("{" in prompt for prompt in drawn)


@pytest.mark.parametrize(
    "text",
    [
        '["one  two", "three", "one two"]',
        '[{"prompt": "one  two"}, {"prompt": "three", "domain": "prompts"}]',
        '"one  two"\n\n{"messages": [{"role": "system", "content": "be brief"}, '
        '{"role": "user", "content": "three"}]}\n',
        '{"prompt": "one  two", "answer": 1}\n{"prompt": "three"}\n{"prompt": "three"}',
    ],
)
def test_prompts_come_from_lists_and_lines_and_are_not_repeated(text, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    wanted = ["one  two", "three"]
    assert read_prompts(path) == [{"domain": "prompts", "prompt": one} for one in wanted]


def test_prompts_of_a_file_from_windows_and_of_a_cut_emoji_are_read(tmp_path):
    """A JavaScript that cuts text amid a character writes half of it: no tokenizer takes that."""
    path = tmp_path / "prompts.jsonl"
    lines = b'{"prompt": "one \\ud83d"}', b"", '"\\ud83d\\ude00 zwei, drei \U0001f600"'.encode()
    for begin, end in ((b"\xef\xbb\xbf", b"\r\n"), (b"", b"\n")):
        path.write_bytes(begin + end.join(lines) + end)
        prompts = [row["prompt"] for row in read_prompts(path)]
        assert prompts == ["one \ufffd", "\U0001f600 zwei, drei \U0001f600"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no prompt: write one a line"),
        ("[]", "holds no prompt: write one a line"),
        ("[3]", "row 1 is none of a string"),
        ('"one"\n{"question": "two"}', "row 2 is none of a string"),
        ('"one"\n{"prompt": ', "prompts.json:2 is not JSON"),
        ("[1, ", "prompts.json:1 is not JSON"),
        ('"a\u2028b"\n{"prompt": ', "prompts.json:2 is not JSON"),
        ('{"prompt": "  "}', "row 1 is none of"),
    ],
)
def test_a_prompt_file_of_another_form_is_refused(text, sentence, tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence) as refused:
        read_prompts(path)
    assert str(path) in str(refused.value)
