"""Sampled replies with MTP have the model's own distribution: joint, over the first three tokens.

A bias restricts nano-deepseek to four tokens, so the 64 possible replies can be counted. Two
samples of 20,480 replies, without and with MTP, are compared with each other and with the exact
distribution that transformers gives by enumeration (chi-square); filtered sampling on a quarter of
them, and on all in the slow tests. Nine comparisons at p > 0.001 each: a right implementation fails
the module once in 111 runs at most (union bound). Broken verifiers, compared in the same way on
2,048 replies, give p < 1e-6.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from launched_server import LaunchedServer, Reply
from reference_model import ReferenceModel
from server_pairs import MISTAKES, TEST_TIMEOUT_S, ask_both, broken_verifiers, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import conversation

NUM_DRAWS = 20_480
NUM_DRAWS_BROKEN = 2_048
BATCH = 256
LENGTH = 3
MIN_P, MAX_P_BROKEN = 1e-3, 1e-6
# Fewer expected draws than this and a cell is pooled with the other rare ones (Cochran's rule).
MIN_EXPECTED = 5
# Added to the logits of the allowed tokens: e^-100 of the mass is left to all others.
BIAS = 100.0

QUESTION = "Which is larger, 5 or 77?"
ALLOWED = ("7", "5", "0", "2")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


@dataclass(frozen=True)
class Sampler:
    """The parameters of one request, and the distribution that they ask for."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1

    def request(self, allowed: list[int]) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": LENGTH,
            "ignore_eos": True,
            "logit_bias": {str(token): BIAS for token in allowed},
        }

    def filtered(self, logprobs: np.ndarray) -> np.ndarray:
        """float64 [4] log-probabilities -> probabilities: temperature, top-k, top-p.

        A token stays if it is among the top_k and those before it hold at most top_p.
        """
        scaled = np.exp((logprobs - logprobs.max()) / self.temperature)
        probs = scaled / scaled.sum()
        order = np.argsort(-probs)
        before = np.cumsum(probs[order]) - probs[order]
        kept = before <= self.top_p
        if self.top_k > 0:
            kept[self.top_k :] = False
        probs[order[~kept]] = 0.0
        return probs / probs.sum()


SAMPLERS = {
    "temperature 1": Sampler(1.0),
    "temperature 0.7, top-p 0.9, top-k 3": Sampler(0.7, top_p=0.9, top_k=3),
}


@pytest.fixture
def prompt(tokenizer) -> list[int]:
    return conversation(tokenizer, QUESTION)


@pytest.fixture
def allowed(tokenizer) -> list[int]:
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in ALLOWED]
    assert all(len(ids) == 1 for ids in tokens)
    return [ids[0] for ids in tokens]


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path) -> list[LaunchedServer]:
    return servers.get(*plain_and_mtp(model_folder))


def draw(server: LaunchedServer, prompt: list[int], sampling: dict[str, Any], count: int):
    """`count` replies to one prompt, BATCH of them in flight."""
    replies: list[Reply] = []
    for _ in range(count // BATCH):
        replies += server.generate([prompt] * BATCH, sampling)
    return replies


def counts_of(replies: list[Reply], allowed: list[int]) -> np.ndarray:
    """int [64]: how often each sequence of three allowed tokens was the reply."""
    seen = Counter(tuple(reply.tokens) for reply in replies)
    assert seen.keys() <= set(itertools.product(allowed, repeat=LENGTH))
    return np.array([seen[cell] for cell in itertools.product(allowed, repeat=LENGTH)])


def exact_distribution(
    reference: ReferenceModel, prompt: list[int], allowed: list[int], sampler: Sampler
) -> np.ndarray:
    """float64 [64]: p(t1) p(t2 | t1) p(t3 | t1 t2) from transformers in fp32."""
    columns = torch.tensor(allowed)

    def next_probs(prefix: tuple[int, ...]) -> np.ndarray:
        logprobs = reference.logprobs([*prompt, *prefix])[-1, columns]
        return sampler.filtered(logprobs.double().numpy())

    def joint(prefix: tuple[int, ...], mass: float) -> list[float]:
        if len(prefix) == LENGTH:
            return [mass]
        branches = zip(allowed, next_probs(prefix), strict=True)
        return [p for token, q in branches for p in joint((*prefix, token), mass * q)]

    return np.array(joint((), 1.0))


def pooled(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cells that are expected often enough, and all others as one more cell."""
    often = expected >= MIN_EXPECTED

    def with_rest(cells: np.ndarray) -> np.ndarray:
        return np.append(cells[..., often], cells[..., ~often].sum(-1, keepdims=True), axis=-1)

    counts, expected = with_rest(counts), with_rest(expected)
    return counts[..., expected > 0], expected[expected > 0]


def p_against_exact(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Goodness of fit; a reply that the model cannot give is impossible, not unlikely."""
    if counts[probabilities == 0].any():
        return 0.0
    observed, expected = pooled(counts, counts.sum() * probabilities)
    return float(scipy.stats.chisquare(observed, expected).pvalue)


def p_of_same_source(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sample homogeneity."""
    smaller = min(a.sum(), b.sum()) * (a + b) / (a + b).sum()
    observed, _ = pooled(np.stack([a, b]), smaller)
    return float(scipy.stats.chi2_contingency(observed).pvalue)


@pytest.mark.parametrize(
    ("case", "num_draws"),
    [
        ("temperature 1", NUM_DRAWS),
        ("temperature 0.7, top-p 0.9, top-k 3", NUM_DRAWS // 4),
        pytest.param("temperature 0.7, top-p 0.9, top-k 3", NUM_DRAWS, marks=pytest.mark.slow),
    ],
)
def test_sampled_replies_have_the_models_distribution(
    pair: list[LaunchedServer],
    reference: ReferenceModel,
    prompt: list[int],
    allowed: list[int],
    case: str,
    num_draws: int,
) -> None:
    sampler = SAMPLERS[case]
    sampling = sampler.request(allowed)
    without, with_mtp = ask_both(pair, lambda server: draw(server, prompt, sampling, num_draws))
    exact = exact_distribution(reference, prompt, allowed, sampler)
    plain, mtp = counts_of(without, allowed), counts_of(with_mtp, allowed)
    p_values = {
        "with and without": p_of_same_source(plain, mtp),
        "with and exact": p_against_exact(mtp, exact),
        "without and exact": p_against_exact(plain, exact),
    }
    share = share_of_draws_with_accepted_drafts(with_mtp)
    print(f"{case}: p {p_values}, drafts accepted in {share:.0%} of the replies")
    assert plain.sum() == mtp.sum() == num_draws
    assert min(p_values.values()) > MIN_P, p_values
    assert 0.02 < share < 0.98, "the drafts must sometimes be accepted and sometimes not"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_verifier_is_found(
    servers: ServerPool,
    model_folder: Path,
    reference: ReferenceModel,
    prompt: list[int],
    allowed: list[int],
    mistake: str,
) -> None:
    """The control: the comparison above fails by a wide margin, on fewer draws."""
    server = servers.get(*broken_verifiers(model_folder))[MISTAKES.index(mistake)]
    sampler = SAMPLERS["temperature 1"]
    counts = counts_of(draw(server, prompt, sampler.request(allowed), NUM_DRAWS_BROKEN), allowed)
    p_value = p_against_exact(counts, exact_distribution(reference, prompt, allowed, sampler))
    print(f"{mistake}: p = {p_value:.1e}")
    assert p_value < MAX_P_BROKEN


def share_of_draws_with_accepted_drafts(replies: list[Reply]) -> float:
    return float(np.mean([reply.meta["spec_num_correct_drafts"] > 0 for reply in replies]))
