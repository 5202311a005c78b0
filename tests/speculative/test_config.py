"""The chain that three flags describe: any consistent subset works, the rest is one sentence."""

import dataclasses

import pytest

from sglang_ascend.speculative.config import MTPConfig, MTPConfigError, resolve_config

# (num_steps, topk, num_draft_tokens) -> num_steps
ACCEPTED = [
    ((None, None, None), 3),
    ((None, 1, None), 3),
    ((1, None, None), 1),
    ((15, None, None), 15),
    ((None, None, 2), 1),
    ((None, None, 16), 15),
    ((4, 1, 5), 4),
]

# The words that tell the reader which flag is wrong, what it was, and what to do.
REFUSED = [
    ((None, 2, None), ["--speculative-eagle-topk 2", "set it to 1 or leave it out"]),
    ((3, 0, 4), ["--speculative-eagle-topk 0", "set it to 1 or leave it out"]),
    ((0, None, None), ["--speculative-num-steps", "between 1 and 15", "got 0", "leave it out"]),
    ((-1, None, None), ["--speculative-num-steps", "between 1 and 15", "got -1"]),
    ((16, None, None), ["--speculative-num-steps", "between 1 and 15", "got 16"]),
    ((None, None, 1), ["--speculative-num-draft-tokens", "between 2 and 16", "got 1"]),
    ((None, None, 17), ["--speculative-num-draft-tokens", "between 2 and 16", "got 17"]),
    ((3, 1, 3), ["--speculative-num-draft-tokens 3", "3 steps", "set it to 4 or leave it out"]),
    ((3, 1, 5), ["--speculative-num-draft-tokens 5", "3 steps", "set it to 4 or leave it out"]),
]


@pytest.mark.parametrize(("flags", "num_steps"), ACCEPTED)
def test_consistent_flags_give_a_chain(flags, num_steps):
    config = resolve_config(*flags)
    assert config == MTPConfig(num_steps=num_steps)
    assert config.num_draft_tokens == num_steps + 1


@pytest.mark.parametrize(("flags", "words"), REFUSED)
def test_anything_else_is_refused_in_one_sentence(flags, words):
    with pytest.raises(MTPConfigError) as refusal:
        resolve_config(*flags)
    sentence = str(refusal.value)
    for word in words:
        assert word in sentence
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0
    assert "\n" not in sentence


def test_a_chain_cannot_change_under_a_running_server():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MTPConfig().num_steps = 5
