"""What one loss has over another is paired: by seed and by reply."""

from __future__ import annotations

import random

import pytest

from benchmarks.losses import bind, compared


def test_a_small_gain_of_every_reply_is_seen_among_replies_that_differ_much():
    rng = random.Random(1)
    rows = [[(rng.randrange(0, 300), 100) for _ in range(30)] for _ in range(3)]
    better = [[(kept + 10, forwards) for kept, forwards in seed] for seed in rows]
    shuffled = [rng.sample(seed, len(seed)) for seed in better]
    found = compared({"kl": rows, "lk": better, "other replies": shuffled}, "kl")
    for name in ("lk", "other replies"):
        assert abs(found[name]["over_reference"]["difference"] - 0.1) < 1e-9
    assert found["kl"]["over_reference"] == {"difference": 0, "low": 0, "high": 0}
    assert found["lk"]["over_reference"]["low"] > 0.09
    # Control: of replies that are not each other's pair the same gain is no more than noise.
    assert found["other replies"]["over_reference"]["low"] < 0
    assert found["lk"]["high"] - found["lk"]["low"] > 0.3


def test_a_folder_holds_layers_of_the_same_options(tmp_path):
    bind(tmp_path / "work", {"--tokens": 20_000, "--num-steps": 3})
    bind(tmp_path / "work", {"--tokens": 20_000, "--num-steps": 3})
    with pytest.raises(SystemExit, match="--tokens is 60000 and was 20000"):
        bind(tmp_path / "work", {"--tokens": 60_000, "--num-steps": 3})


def test_lengths_are_tokens_per_forward():
    found = compared({"kl": [[(10, 10), (0, 30)]], "ce": [[(20, 10), (20, 10)]]}, "kl")
    assert found["kl"]["accept_length"] == 1.25
    assert found["ce"]["accept_length"] == 3.0
