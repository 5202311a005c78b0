"""The draft vocabulary: the token ids a draft may propose. Verification keeps the full one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

FILE_NAME = "draft_vocabulary.json"


class DraftVocabularyError(ValueError):
    """The file is wrong; the message is one sentence that names it and the remedy."""


def read_draft_vocabulary(folder: Path, vocab_size: int) -> torch.Tensor | None:
    """Global ids of the draft head's rows, int64 [draft_vocab_size] ascending, or None.

    ``folder`` is the checkpoint that holds the MTP layer; without the file drafts use every token.
    A draft of a token outside the list is never proposed, so it costs acceptance and never
    correctness (FR-Spec, arXiv 2502.14856). JSON: {"token_ids": [...]}.

    Raises DraftVocabularyError.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    remedy = "rebuild it or delete it to draft from the full vocabulary"
    try:
        token_ids = json.loads(path.read_text(encoding="utf-8"))["token_ids"]
        ids = torch.tensor(token_ids, dtype=torch.int64)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise DraftVocabularyError(
            f'{path} is not {{"token_ids": [integers]}} ({type(error).__name__}): {remedy}.'
        ) from None
    if ids.dim() != 1 or not 0 < len(ids) <= vocab_size:
        raise DraftVocabularyError(f"{path} must list 1 to {vocab_size} token ids: {remedy}.")
    if ids[0] < 0 or ids[-1] >= vocab_size or bool((ids[1:] <= ids[:-1]).any()):
        raise DraftVocabularyError(
            f"{path} must list ascending, distinct ids below {vocab_size}: {remedy}."
        )
    return ids
