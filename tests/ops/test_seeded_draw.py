"""A seeded draw among the kept tokens is SGLang's, and has the distribution of what is kept.

The oracle hashes and races in NumPy, without the code's filter or hash.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kept_tokens import random_rows, tokens_kept

from sglang_ascend.ops import sampling
from sglang_ascend.ops.sampling.threshold import Kept

pytestmark = pytest.mark.usefixtures("triton_interpreter")

VOCAB_SIZE = 129280  # DeepSeek-V3's


def murmur3(*words: np.ndarray) -> np.ndarray:
    """MurmurHash3 x86 32-bit, seed 0, of uint32 words; uint32 wraps."""
    h = np.zeros_like(words[0])
    for k in words:
        k = k * np.uint32(0xCC9E2D51)
        h = h ^ ((k << 15 | k >> 17) * np.uint32(0x1B873593))
        h = (h << 13 | h >> 19) * np.uint32(5) + np.uint32(0xE6546B64)
    h = h ^ np.uint32(4 * len(words))
    h = (h ^ h >> 16) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * np.uint32(0xC2B2AE35)
    return h ^ h >> 16


def scores_of_the_race(logits: np.ndarray, kept: np.ndarray, seeds, positions) -> np.ndarray:
    seeds = seeds.numpy().astype(np.uint64)[:, None]
    tokens = np.arange(logits.shape[1], dtype=np.uint64)[None]
    words = (seeds % 2**32, seeds >> 32, positions.numpy().astype(np.uint64)[:, None], tokens)
    hashed = murmur3(*np.broadcast_arrays(*(word.astype(np.uint32) for word in words)))
    with np.errstate(divide="ignore"):
        noise = np.maximum(-np.log(hashed / (2.0**32 - 1)), 2.0**-32)
    return np.where(kept, logits - np.log(noise), -np.inf)


def random_draws(num_rows: int, vocab_size: int):
    """(logits, what is kept of them, seeds, positions)"""
    logits, top_ks, top_ps = random_rows(num_rows, vocab_size, seed=9)
    kept = sampling.top_k_top_p.implementation("reference")(logits, top_ks, top_ps)
    generator = torch.Generator().manual_seed(10)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    return logits, kept, seeds, torch.randint(2**20, (num_rows,), generator=generator)


@pytest.mark.parametrize(
    ("body", "num_rows", "vocab_size"),
    [
        ("reference", 5000, 70),
        ("numba", 5000, 70),
        ("numba", 8, VOCAB_SIZE),
        ("triton", 30, 70),
        pytest.param("triton", 500, 70, marks=pytest.mark.slow),
        pytest.param("triton", 3, VOCAB_SIZE, marks=pytest.mark.slow),
    ],
)
def test_a_draw_is_won_by_the_token_that_the_hash_says(body, num_rows, vocab_size):
    """Where two tokens are level within fp32, Triton's kernel may take either."""
    logits, kept, seeds, positions = random_draws(num_rows, vocab_size)
    drawn = sampling.draw_kept.implementation(body)(logits, kept, seeds, positions)
    values = logits.numpy().astype(np.float64)
    scores = scores_of_the_race(values, tokens_kept(logits, kept), seeds, positions)
    differs = drawn.numpy() != scores.argmax(axis=1)
    behind = scores.max(axis=1) - np.take_along_axis(scores, drawn.numpy()[:, None], axis=1)[:, 0]
    assert (behind[differs] < 1e-5).all()
    assert differs.sum() <= (1 if body == "triton" else 0)


def sglangs_seeded_draw(torch=torch):
    """SGLang's function by its source, for `import sglang` takes long; the hash is ours."""
    (folder,) = find_spec("sglang").submodule_search_locations
    tree = ast.parse((Path(folder) / "srt/layers/sampler.py").read_text())
    (function,) = (
        node for node in tree.body if getattr(node, "name", "") == "multinomial_with_seed"
    )
    function.decorator_list = []
    names = {"torch": torch, "murmur_hash32": sampling.murmur_hash32}
    exec(compile(ast.Module([function], []), "sampler.py", "exec"), names)
    return names["multinomial_with_seed"]


def test_a_draw_is_the_one_of_sglang_among_the_same_tokens():
    logits, kept, seeds, positions = random_draws(2000, 50)
    probabilities = kept.probabilities(logits, torch.arange(50).expand(len(logits), -1))
    theirs = sglangs_seeded_draw()(probabilities.double().log(), seeds, positions)
    ours = sampling.draw_kept(logits, kept, seeds, positions)
    assert (ours != theirs[:, 0]).sum() <= 1  # their probability is rounded to fp32 first


# Its hash is 88 below 2^32: in float32 it is 1.
SEED, POSITION, TOKEN = 7, 3581, 3960


def test_a_race_in_float32_is_won_by_the_token_that_wins_in_float64():
    logprobs = torch.randn(2000, 50, generator=torch.Generator().manual_seed(3)) * 4
    seeds, positions = torch.arange(2000), torch.arange(2000) * 3
    theirs = sglangs_seeded_draw()(logprobs, seeds, positions)
    assert torch.equal(sampling.race_by_seed(logprobs, seeds, positions), theirs[:, 0])


def test_a_hash_that_rounds_to_1_does_not_win_in_float32():
    logprobs = torch.zeros(1, 4096)
    logprobs[0, TOKEN] = -12.0
    place = torch.tensor([SEED]), torch.tensor([POSITION])
    without_float64 = SimpleNamespace(**{**vars(torch), "float64": torch.float32})
    assert sglangs_seeded_draw(without_float64)(logprobs, *place) == TOKEN
    assert sampling.race_by_seed(logprobs, *place) == sglangs_seeded_draw()(logprobs, *place)
    assert sampling.race_by_seed(logprobs, *place) != TOKEN


def chi_square(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * len(drawn)
    observed = drawn.bincount(minlength=len(probabilities)).double()
    if (observed[expected == 0] > 0).any():
        return float("inf")
    terms = (observed - expected) ** 2 / expected
    return terms[expected > 0].sum().item()


ONE_ROW = torch.tensor([2.0, 0.5, 1.5, 1.0, -1.0, 0.0])
CRITICAL = 21.1  # chi-square of 3 degrees of freedom exceeds it once in 10,000


@pytest.mark.parametrize("body", ["reference", "numba"])
def test_draws_have_the_distribution_of_what_is_kept(body):
    rows = ONE_ROW.expand(40_000, -1)
    kept = sampling.top_k_top_p.implementation(body)(
        rows, torch.full((len(rows),), 5), torch.full((len(rows),), 0.9)
    )
    probabilities = kept.probabilities(rows[:1], torch.arange(6)[None])[0]
    assert (probabilities > 0).tolist() == [True, True, True, True, False, False]
    draw = sampling.draw_kept.implementation(body)
    drawn = draw(rows, kept, torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.int64))
    assert chi_square(drawn, probabilities) < CRITICAL

    unfiltered = Kept(torch.full_like(kept.threshold, -9.0), kept.max, kept.mass, kept.group_max)
    drawn = draw(rows, unfiltered, torch.arange(len(rows)), torch.zeros_like(drawn))
    assert chi_square(drawn, probabilities) > CRITICAL
    drawn = draw(rows, kept, torch.arange(len(rows)) % 100, torch.zeros_like(drawn))
    assert chi_square(drawn, probabilities) > CRITICAL
