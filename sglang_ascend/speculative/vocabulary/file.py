"""The draft vocabulary: the token ids a draft may propose. Verification keeps the full one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_ascend.speculative.vocabulary.scripts import SPECIAL

FILE_NAME = "draft_vocabulary.json"
_REMEDY = "rebuild it or delete it to draft from the full vocabulary"


class DraftVocabularyError(ValueError):
    """The file is wrong; the message is one sentence that names it and the remedy."""


@dataclass(frozen=True)
class Language:
    """What drafts of one language may propose, and how often its text has each of these tokens."""

    name: str
    token_ids: torch.Tensor  # int64 [size] ascending
    counts: torch.Tensor  # int64 [size]


@dataclass(frozen=True)
class DraftVocabulary:
    """One list of tokens for every request, or one for each language."""

    token_ids: torch.Tensor  # int64 ascending; of the languages all that some language has
    languages: tuple[Language, ...] = ()
    script_of_token: torch.Tensor | None = None  # int64 [vocab_size], numbers of scripts
    special_script: int | None = None  # the number of the tokenizer's own tokens

    @property
    def lists(self) -> list[torch.Tensor]:
        """One for each language, or the only one."""
        return [one.token_ids for one in self.languages] or [self.token_ids]

    @property
    def listed_by_all(self) -> torch.Tensor:
        """int64 ascending"""
        ids, times = torch.cat(self.lists).unique(return_counts=True)
        return ids[times == len(self.lists)]

    @property
    def num_rows(self) -> int:
        """Rows of all heads that are cut out."""
        return sum(map(len, self.lists))


def read_vocabulary(folder: Path, vocab_size: int) -> DraftVocabulary | None:
    """What the checkpoint with the MTP layer in ``folder`` says; None: drafts use every token.

    A draft of a token outside the list is never proposed, so it costs acceptance and never
    correctness (FR-Spec, arXiv 2502.14856). JSON, told apart by what it holds: {"token_ids":
    [...]}, or what ``sglang-ascend build-vocabulary`` writes: {"languages": [{"name", "token_ids",
    "counts"}, ...], "scripts": {"names", "of_token"}}.

    Raises DraftVocabularyError.
    """
    path = folder / FILE_NAME
    return parse_vocabulary(path, path.read_bytes(), vocab_size) if path.is_file() else None


def parse_vocabulary(path: Path, text: bytes, vocab_size: int) -> DraftVocabulary:
    """What a file at ``path`` says whose content is ``text``. Raises DraftVocabularyError."""
    try:
        content = json.loads(text.decode("utf-8"))
        if "languages" in content:
            return _by_language(path, content, vocab_size)
        ids = _integers(content["token_ids"])
    except DraftVocabularyError:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise DraftVocabularyError(
            f'{path} has neither {{"token_ids": [integers]}} nor the "languages" that '
            f"`sglang-ascend build-vocabulary` writes ({type(error).__name__}): {_REMEDY}."
        ) from None
    _check_ids(path, ids, vocab_size)
    return DraftVocabulary(ids)


def read_draft_vocabulary(folder: Path, vocab_size: int) -> torch.Tensor | None:
    """As ``read_vocabulary``, for who has one head: int64 ids, ascending, or None.

    Raises DraftVocabularyError.
    """
    vocabulary = read_vocabulary(folder, vocab_size)
    return None if vocabulary is None else vocabulary.token_ids


def _by_language(path: Path, content: dict[str, Any], vocab_size: int) -> DraftVocabulary:
    languages = []
    for row in content["languages"]:
        ids, counts = _integers(row["token_ids"]), _integers(row["counts"])
        order = ids.argsort()
        _check_ids(path, ids[order], vocab_size)
        if counts.shape != ids.shape or bool((counts < 0).any()) or not counts.sum():
            raise DraftVocabularyError(
                f"{path} must give language {row['name']!r} a count for each token id: {_REMEDY}."
            )
        languages.append(Language(str(row["name"]), ids[order], counts[order]))
    names = list(content["scripts"]["names"])
    scripts = _integers(content["scripts"]["of_token"])
    fits = scripts.shape == (vocab_size,) and 0 <= scripts.min() <= scripts.max() < len(names)
    if not languages or not fits:
        raise DraftVocabularyError(
            f"{path} must have a language, and the script of each of {vocab_size} tokens: "
            "build it with this model's tokenizer."
        )
    vocabulary = DraftVocabulary(
        torch.cat([one.token_ids for one in languages]).unique(),
        tuple(languages),
        scripts,
        names.index(SPECIAL) if SPECIAL in names else None,
    )
    if vocabulary.num_rows > vocab_size:
        raise DraftVocabularyError(
            f"{path} lists {vocabulary.num_rows} tokens in all, of a vocabulary of {vocab_size}, "
            "so that cut heads would be larger than the whole one: rebuild it with a lower --size "
            "or fewer languages."
        )
    return vocabulary


def _integers(values: list[int]) -> torch.Tensor:
    """int64 [n]. Raises TypeError for other values, of which PyTorch would cut a fraction off."""
    if not all(type(value) is int for value in values):
        raise TypeError("not a list of integers")
    return torch.tensor(values, dtype=torch.int64)


def _check_ids(path: Path, ids: torch.Tensor, vocab_size: int) -> None:
    """Of a list in ascending order."""
    if ids.dim() != 1 or not 0 < len(ids) <= vocab_size:
        raise DraftVocabularyError(f"{path} must list 1 to {vocab_size} token ids: {_REMEDY}.")
    if ids[0] < 0 or ids[-1] >= vocab_size or bool((ids[1:] <= ids[:-1]).any()):
        raise DraftVocabularyError(
            f"{path} must list ascending, distinct ids below {vocab_size}: {_REMEDY}."
        )
