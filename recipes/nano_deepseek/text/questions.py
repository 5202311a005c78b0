"""Owns the synthetic question set of nano-deepseek: drawn from a seed, split by question.

A question's normalised text alone decides its side, so no document can carry it across the split.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from recipes.nano_deepseek.text import chat, maths

SEED = 20261121
DRAWS = 40_000
HELD_OUT_ONE_IN = 20
SAMPLERS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "maths": maths.sample,
    "chat": chat.sample,
}


@dataclass(frozen=True)
class QuestionSplit:
    """(question, answer) pairs of one domain in the order drawn; `held_out` has no question twice.

    `train` keeps repeats: without them the families with few questions would hardly be seen.
    """

    train: list[tuple[str, str]]
    held_out: list[tuple[str, str]]


def normalise(question: str) -> str:
    """Case, width and spacing do not make a question new."""
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", question)).strip().lower()


def is_held_out(question: str) -> bool:
    """One question in `HELD_OUT_ONE_IN`, chosen by its hash and by nothing else."""
    digest = hashlib.blake2b(normalise(question).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def draw_questions(domain: str, draws: int = DRAWS, seed: int = SEED) -> QuestionSplit:
    """Draw `draws` questions of `domain` ("maths" or "chat") and split them by question."""
    rng = Random(f"{seed}-{domain}")
    split, seen = QuestionSplit([], []), set()
    for _ in range(draws):
        question, answer = SAMPLERS[domain](rng)
        if not is_held_out(question):
            split.train.append((question, answer))
        elif normalise(question) not in seen:
            seen.add(normalise(question))
            split.held_out.append((question, answer))
    return split


def conversations(pairs: list[tuple[str, str]], seed: int) -> list[list[tuple[str, str]]]:
    """Group `pairs` into conversations of 1 to 5 turns, each pair used once."""
    rng = Random(seed)
    shuffled = rng.sample(pairs, len(pairs))
    grouped, start = [], 0
    while start < len(shuffled):
        turns = rng.randint(1, 5)
        grouped.append(shuffled[start : start + turns])
        start += turns
    return grouped
