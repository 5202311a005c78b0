"""A seeded draw is SGLang's, and has the distribution that it is made from.

The oracle hashes and samples in NumPy, in float64, without the code's hash.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from sglang_ascend.ops import sampling
from sglang_ascend.sampling.noise import exponential


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


def hashed_in_numpy(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> np.ndarray:
    seeds = seeds.numpy().astype(np.uint64)[:, None]
    tokens = np.arange(num_tokens, dtype=np.uint64)[None]
    words = (seeds % 2**32, seeds >> 32, positions.numpy().astype(np.uint64)[:, None], tokens)
    return murmur3(*np.broadcast_arrays(*(word.astype(np.uint32) for word in words)))


def scores_in_numpy(logprobs: torch.Tensor, seeds, positions) -> np.ndarray:
    with np.errstate(divide="ignore"):
        uniform = hashed_in_numpy(seeds, positions, logprobs.shape[1]) / (2.0**32 - 1)
        noise = np.maximum(-np.log(uniform), 2.0**-32)
    return logprobs.numpy().astype(np.float64) - np.log(noise)


def random_rows(num_rows: int, vocab_size: int):
    """(log-probabilities of which a third is none, seeds, positions)"""
    generator = torch.Generator().manual_seed(10)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    logits[torch.rand(num_rows, vocab_size, generator=generator) < 1 / 3] = -torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(2**20, (num_rows,), generator=generator)
    return logits.log_softmax(-1), seeds, positions


def sample_by_seed(logprobs: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
    return sampling.sample(logprobs.exp(), exponential(*place, logprobs.shape[1]))


def test_the_hash_is_murmur3_of_seed_position_and_token():
    _, seeds, positions = random_rows(300, 1)
    hashed = sampling.murmur_hash32(seeds, positions, torch.arange(500))
    assert (hashed.numpy() == hashed_in_numpy(seeds, positions, 500)).all()
    assert (hashed.numpy() != hashed_in_numpy(seeds, positions + 1, 500)).any()


def test_a_draw_is_won_by_the_token_that_the_hash_says():
    """Where two tokens are level within fp32, either may be taken."""
    logprobs, seeds, positions = random_rows(5000, 70)
    drawn = sample_by_seed(logprobs, seeds, positions).numpy()
    scores = scores_in_numpy(logprobs, seeds, positions)
    differs = drawn != scores.argmax(axis=1)
    behind = scores.max(axis=1) - np.take_along_axis(scores, drawn[:, None], axis=1)[:, 0]
    assert (behind[differs] < 1e-5).all()
    assert differs.sum() <= 1
    others = sample_by_seed(logprobs, seeds, positions + 1).numpy()
    assert (others != scores.argmax(axis=1)).sum() > 1000


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


# Its hash is 88 below 2^32: in float32 it is 1.
SEED, POSITION, TOKEN = 7, 3581, 3960


def test_a_draw_in_float32_is_the_one_of_sglang_in_float64():
    logprobs = torch.randn(2000, 50, generator=torch.Generator().manual_seed(3)) * 4
    seeds, positions = torch.arange(2000), torch.arange(2000) * 3
    theirs = sglangs_seeded_draw()(logprobs, seeds, positions)
    assert torch.equal(sample_by_seed(logprobs, seeds, positions), theirs[:, 0])


def test_a_hash_that_rounds_to_1_does_not_win_in_float32():
    logprobs = torch.zeros(1, 4096)
    logprobs[0, TOKEN] = -12.0
    place = torch.tensor([SEED]), torch.tensor([POSITION])
    without_float64 = SimpleNamespace(**{**vars(torch), "float64": torch.float32})
    assert sglangs_seeded_draw(without_float64)(logprobs, *place) == TOKEN
    assert sample_by_seed(logprobs, *place) == sglangs_seeded_draw()(logprobs, *place)
    assert sample_by_seed(logprobs, *place) != TOKEN


def chi_square(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * len(drawn)
    observed = drawn.bincount(minlength=len(probabilities)).double()
    if (observed[expected == 0] > 0).any():
        return float("inf")
    terms = (observed - expected) ** 2 / expected
    return terms[expected > 0].sum().item()


KEPT = torch.tensor([2.0, 0.5, 1.5, 1.0, -torch.inf, -torch.inf])
CRITICAL = 21.1  # chi-square of 3 degrees of freedom exceeds it once in 10,000


def test_draws_have_the_distribution_that_they_are_made_from():
    seeds, zeros = torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64)
    rows, probabilities = KEPT.log_softmax(-1).expand(len(seeds), -1), KEPT.softmax(-1)
    assert chi_square(sample_by_seed(rows, seeds, zeros), probabilities) < CRITICAL

    unfiltered = KEPT.clamp(min=-1.0).log_softmax(-1).expand(len(seeds), -1)
    assert chi_square(sample_by_seed(unfiltered, seeds, zeros), probabilities) > CRITICAL
    assert chi_square(sample_by_seed(rows, seeds % 100, zeros), probabilities) > CRITICAL
