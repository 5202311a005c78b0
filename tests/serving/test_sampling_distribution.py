"""Sampled replies with MTP have the model's own distribution: joint, over the first three tokens.

A bias restricts nano-deepseek to four tokens, so the 64 possible replies can be counted. Two
samples of 5,120 replies, without and with MTP, are compared with each other and with the exact
distribution that transformers gives by enumeration (chi-square); in the slow tests of 20,480, where
penalties, min-p and rejection sampling are too. Every comparison is at p > 0.001. A right
implementation misses that in one of the six of `make test` once in 167 runs at most (union bound),
and in the 45 of `make test-all` once in 22. So a case that misses it is drawn again, four times as
often, and fails if it misses it again: what chance did is not repeated (once in 55,000 runs, and
7,000), and a wrong distribution shows more clearly in more draws. Broken verifiers, compared in
the same way on 2,048 replies, give p < 1e-6.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from launched_server import LaunchedServer, Reply, ServerConfig
from reference_model import ReferenceModel
from server_pairs import (
    MISTAKES,
    REJECTION_MISTAKES,
    TEST_TIMEOUT_S,
    ask_both,
    broken_verifier,
    broken_verifiers,
    plain_and_mtp,
)
from server_pool import ServerPool
from serving_prompts import conversation
from watched_acceptance import with_parts

NUM_DRAWS = 20_480
NUM_DRAWS_BROKEN = 2_048
BATCH = 256
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
class Cells:
    """Every reply that a request can have: sequences of allowed tokens."""

    allowed: list[int]
    length: int

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(self.allowed, repeat=self.length)

    def count(self, replies: list[Reply]) -> np.ndarray:
        """int [cells]: how often each was the reply."""
        seen = Counter(tuple(reply.tokens) for reply in replies)
        assert seen.keys() <= set(self)
        return np.array([seen[cell] for cell in self])


@dataclass(frozen=True)
class Sampler:
    """The parameters of one request, and the distribution that they ask for."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def request(self, cells: Cells) -> dict[str, Any]:
        return {
            **asdict(self),
            "max_new_tokens": cells.length,
            "ignore_eos": True,
            "logit_bias": {str(token): BIAS for token in cells.allowed},
        }

    def distribution(self, logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """float64 [4] logits, and how often each token was emitted -> probabilities.

        Penalties, then temperature; then a token stays if it is among the top_k, those before it
        hold at most top_p, and it has at least min_p of the likeliest one's probability.
        """
        penalised = logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)
        factor = self.repetition_penalty
        scaled = np.where(penalised < 0, penalised * factor, penalised / factor)
        penalised = np.where(counts > 0, scaled, penalised)
        weights = np.exp((penalised - penalised.max()) / self.temperature)
        probs = weights / weights.sum()
        order = np.argsort(-probs)
        before = np.cumsum(probs[order]) - probs[order]
        kept = (before <= self.top_p) & (probs[order] >= self.min_p * probs.max())
        if self.top_k > 0:
            kept[self.top_k :] = False
        probs[order[~kept]] = 0.0
        return probs / probs.sum()


SAMPLERS = {
    "temperature 1": Sampler(1.0),
    "temperature 0.7, top-p 0.9, top-k 3": Sampler(0.7, top_p=0.9, top_k=3),
    "temperature 1, min-p 0.2": Sampler(1.0, min_p=0.2),
    "temperature 1, penalties": Sampler(
        1.0, frequency_penalty=0.6, presence_penalty=-0.3, repetition_penalty=1.1
    ),
}
REJECTION = ("--speculative-use-rejection-sampling",)


@pytest.fixture
def prompt(tokenizer) -> list[int]:
    return conversation(tokenizer, QUESTION)


@pytest.fixture
def three_tokens(tokenizer) -> Cells:
    return Cells([token_of(tokenizer, text) for text in ALLOWED], length=3)


@pytest.fixture
def five_tokens(tokenizer) -> Cells:
    """Far enough for chains that were drawn: the first one, behind a prompt, is not."""
    return Cells([token_of(tokenizer, text) for text in ALLOWED[:2]], length=5)


def token_of(tokenizer, text: str) -> int:
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return token


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path) -> list[LaunchedServer]:
    return servers.get(*plain_and_mtp(model_folder))


def draw(server: LaunchedServer, prompt: list[int], sampling: dict[str, Any], count: int):
    """`count` replies to one prompt, BATCH of them in flight."""
    replies: list[Reply] = []
    for _ in range(count // BATCH):
        replies += server.generate([prompt] * BATCH, sampling)
    return replies


def exact_distribution(
    reference: ReferenceModel, prompt: list[int], cells: Cells, sampler: Sampler
) -> np.ndarray:
    """float64 [cells]: p(t1) p(t2 | t1) p(t3 | t1 t2) ... from transformers in fp32."""
    allowed = cells.allowed
    columns = torch.tensor(allowed)

    def next_probs(prefix: tuple[int, ...]) -> np.ndarray:
        logits = reference.logits([*prompt, *prefix])[-1, columns]
        counts = np.array([prefix.count(token) for token in allowed])
        return sampler.distribution(logits.double().numpy(), counts)

    def joint(prefix: tuple[int, ...], mass: float) -> list[float]:
        if len(prefix) == cells.length:
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


def check_distribution(
    pair: list[LaunchedServer],
    reference: ReferenceModel,
    prompt: list[int],
    cells: Cells,
    case: str,
    num_draws: int,
) -> None:
    sampler = SAMPLERS[case]
    exact = exact_distribution(reference, prompt, cells, sampler)

    def p_values(num_draws: int) -> dict[str, float]:
        sampling = sampler.request(cells)
        without, with_mtp = ask_both(pair, lambda server: draw(server, prompt, sampling, num_draws))
        plain, mtp = cells.count(without), cells.count(with_mtp)
        assert plain.sum() == mtp.sum() == num_draws
        share = share_of_accepted_drafts(with_mtp)
        assert 0.02 < share < 0.98, "the drafts must sometimes be accepted and sometimes not"
        found = {
            "with and without": p_of_same_source(plain, mtp),
            "with and exact": p_against_exact(mtp, exact),
            "without and exact": p_against_exact(plain, exact),
        }
        print(f"{case}: p {found}, {share:.0%} of the drafts accepted")
        return found

    first = p_values(num_draws)
    if min(first.values()) <= MIN_P:
        again = p_values(4 * num_draws)
        assert min(again.values()) > MIN_P, (first, again)


@pytest.mark.parametrize(
    ("case", "num_draws"),
    [
        ("temperature 1", NUM_DRAWS // 4),
        ("temperature 0.7, top-p 0.9, top-k 3", NUM_DRAWS // 4),
        *(pytest.param(case, NUM_DRAWS, marks=pytest.mark.slow) for case in SAMPLERS),
    ],
)
def test_sampled_replies_have_the_models_distribution(
    pair: list[LaunchedServer],
    reference: ReferenceModel,
    prompt: list[int],
    three_tokens: Cells,
    case: str,
    num_draws: int,
) -> None:
    check_distribution(pair, reference, prompt, three_tokens, case, num_draws)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rejection"])
@pytest.mark.parametrize("case", SAMPLERS)
def test_rejection_sampling_has_the_models_distribution(
    servers: ServerPool,
    model_folder: Path,
    reference: ReferenceModel,
    prompt: list[int],
    five_tokens: Cells,
    case: str,
    variant: str,
) -> None:
    """Drafts drawn from the MTP layer's own distribution, behind the first chain of a reply."""
    pair = servers.get(*plain_and_mtp(model_folder, mtp_flags=REJECTION))
    check_distribution(pair, reference, prompt, five_tokens, case, NUM_DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rejection without overlap"])
def test_rejection_sampling_has_the_models_distribution_without_overlap(
    servers: ServerPool,
    model_folder: Path,
    reference: ReferenceModel,
    prompt: list[int],
    five_tokens: Cells,
    variant: str,
) -> None:
    """Nothing is relayed from step to step there."""
    flags = (*REJECTION, "--disable-overlap-schedule")
    pair = servers.get(*plain_and_mtp(model_folder, mtp_flags=flags))
    check_distribution(pair, reference, prompt, five_tokens, "temperature 1", NUM_DRAWS // 4)


def any_k(folder: Path, *parts: str) -> ServerConfig:
    """Rejection sampling where each step has a K of its own."""
    _, mtp = plain_and_mtp(folder, mtp_flags=(*REJECTION, "--speculative-adaptive"))
    return with_parts(mtp, "forced_drafts", *parts, FORCED_DRAFTS="random")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["any K"])
@pytest.mark.parametrize("case", [*SAMPLERS][:2])
def test_rejection_sampling_has_the_models_distribution_whatever_k_a_step_has(
    servers: ServerPool,
    model_folder: Path,
    reference: ReferenceModel,
    prompt: list[int],
    five_tokens: Cells,
    case: str,
    variant: str,
) -> None:
    pair = servers.get(plain_and_mtp(model_folder)[0], any_k(model_folder))
    check_distribution(pair, reference, prompt, five_tokens, case, NUM_DRAWS // 2)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["stale"])
def test_drafts_that_are_judged_by_what_others_were_drawn_from_are_found(
    servers: ServerPool,
    model_folder: Path,
    reference: ReferenceModel,
    prompt: list[int],
    five_tokens: Cells,
    variant: str,
) -> None:
    """The control of the test above."""
    (server,) = servers.get(any_k(model_folder, "stale_distributions"))
    assert p_of(server, reference, prompt, five_tokens) < MAX_P_BROKEN


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_verifier_is_found(
    servers: ServerPool,
    model_folder: Path,
    reference: ReferenceModel,
    prompt: list[int],
    three_tokens: Cells,
    mistake: str,
) -> None:
    """The control: the comparison above fails by a wide margin, on fewer draws."""
    server = servers.get(*broken_verifiers(model_folder))[MISTAKES.index(mistake)]
    assert p_of(server, reference, prompt, three_tokens) < MAX_P_BROKEN


@pytest.mark.slow
@pytest.mark.parametrize("mistake", REJECTION_MISTAKES)
def test_broken_rejection_sampling_is_found(
    servers: ServerPool,
    model_folder: Path,
    reference: ReferenceModel,
    prompt: list[int],
    five_tokens: Cells,
    mistake: str,
) -> None:
    """The control of rejection sampling."""
    (server,) = servers.get(broken_verifier(model_folder, mistake, REJECTION))
    assert p_of(server, reference, prompt, five_tokens) < MAX_P_BROKEN


def p_of(
    server: LaunchedServer, reference: ReferenceModel, prompt: list[int], cells: Cells
) -> float:
    """Of a small sample at temperature 1, against the exact distribution."""
    sampler = SAMPLERS["temperature 1"]
    replies = draw(server, prompt, sampler.request(cells), NUM_DRAWS_BROKEN)
    if any(tuple(reply.tokens) not in set(cells) for reply in replies):
        p_value = 0.0  # a token that the request cannot have
    else:
        exact = exact_distribution(reference, prompt, cells, sampler)
        p_value = p_against_exact(cells.count(replies), exact)
    print(f"{server.config.variables}: p = {p_value:.1e}")
    return p_value


def share_of_accepted_drafts(replies: list[Reply]) -> float:
    correct, proposed = (
        sum(reply.meta[f"spec_num_{kind}_drafts"] for reply in replies)
        for kind in ("correct", "proposed")
    )
    return correct / proposed
