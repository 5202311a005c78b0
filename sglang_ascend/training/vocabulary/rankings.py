"""Tokens counted by language, and how much of a language so many of its tokens cover."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_ascend.speculative.vocabulary.scripts import dominant_script
from sglang_ascend.training.vocabulary.sources import Source, documents

# Of every so many documents one is not ranked by but measured.
HELD_OUT_EVERY = 10
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MIN_TOKENS = 100  # a language with fewer is a name or a quotation in another one's text


@dataclass
class Counts:
    """int64 [vocab_size] of each language: how often each token is there."""

    vocab_size: int
    ranked: dict[str, np.ndarray] = field(init=False)
    held_out: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        def zeros() -> np.ndarray:
            return np.zeros(self.vocab_size, np.int64)

        self.ranked, self.held_out = defaultdict(zeros), defaultdict(zeros)
        self._documents: dict[str, int] = defaultdict(int)

    def add(self, language: str, tokens: np.ndarray) -> None:
        number = self._documents[language] = self._documents[language] + 1
        into = self.held_out if number % HELD_OUT_EVERY == 0 else self.ranked
        # In the document's time, whatever the vocabulary's size.
        np.add.at(into[language], tokens, 1)

    def of(self, language: str) -> np.ndarray:
        return self.ranked[language] + self.held_out[language]

    def languages(self) -> list[str]:
        """Those with text enough, the one with most of it first."""
        sizes = {name: int(self.of(name).sum()) for name in self._documents}
        return sorted((n for n in sizes if sizes[n] >= MIN_TOKENS), key=lambda n: -sizes[n])

    def coverage(self, language: str) -> dict[int, float] | None:
        """Share of held-out tokens that are among the most frequent ones of the others, by how many
        are taken; None where a language has too little text to hold some out."""
        held_out, ranked = self.held_out[language], self.ranked[language]
        if held_out.sum() < MIN_TOKENS:
            return None
        share = np.cumsum(held_out[ranking(ranked)]) / held_out.sum()
        return {size: float(share[size - 1]) for size in SIZES if size <= self.vocab_size}


def count(
    sources: Iterable[Source],
    encode: Callable[[str], list[int]],
    scripts: tuple[list[str], list[int]],
    tick: Callable[[Source, int], object],
) -> tuple[Counts, list[dict[str, Any]]]:
    """Every token of every source, and what is to be said of where they come from.

    ``scripts`` is what ``scripts_of`` made of the tokenizer; ``tick`` is told the tokens of each
    document.

    Raises SourceError.
    """
    names, of_token = scripts[0], np.array(scripts[1])
    counts, provenance = Counts(len(of_token)), []
    for source in sources:
        tokens_of: dict[str, int] = defaultdict(int)
        for document in documents(source, encode):
            found = np.array(document, np.int64)
            tokens = found[found < counts.vocab_size]  # a tokenizer may have more than its model
            by_script = np.bincount(of_token[tokens], minlength=len(names)).tolist()
            language = source.language or dominant_script(dict(zip(names, by_script, strict=True)))
            counts.add(language, tokens)
            tokens_of[language] += len(tokens)
            tick(source, len(tokens))
        size = source.path.stat().st_size
        row = {"path": str(source.path), "sha256": source.sha256(), "bytes": size}
        provenance.append(row | {"tokens": dict(tokens_of)})
    return counts, provenance


def ranking(counts: np.ndarray) -> np.ndarray:
    """All token ids, the most frequent first; of equals the lower one, which a byte-pair tokenizer
    gives to the more frequent."""
    return np.argsort(-counts, kind="stable")


def vocabulary_list(
    counts: np.ndarray, special_ids: Collection[int], size: int
) -> tuple[list[int], list[int]]:
    """(token ids, the most frequent first; their counts): at most ``size`` that occur, special ones
    among them whether they occur or not."""
    special = set(special_ids)
    chosen = [i for i in ranking(counts).tolist() if counts[i] and i not in special]
    ids = [*sorted(special), *chosen][: max(size, len(special))]
    ids.sort(key=lambda i: -counts[i])
    return ids, counts[ids].tolist()
