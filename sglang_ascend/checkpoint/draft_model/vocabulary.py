"""Which token has which id, as tokenizer.json says; two models can draft for each other only where
both say the same.

``vocab_size`` does not tell: published models pad it, each to a number of its own (Qwen2.5: 151,665
tokens in 151,936 or 152,064 rows).
"""

from __future__ import annotations

from pathlib import Path

from sglang_ascend.checkpoint.errors import CheckpointError, shown, wrong_shape_of_json
from sglang_ascend.checkpoint.reader import read_json_object

FILE_NAME = "tokenizer.json"


def token_ids(path: Path) -> dict[str, int]:
    """The id of every token of the tokenizer.json at ``path``, added tokens included.

    Raises:
        CheckpointError: the file is missing, or has no vocabulary.
    """
    tokenizer = read_json_object(path)
    try:
        listed = tokenizer["model"]["vocab"]
        # A unigram model lists [token, score] in the order of the ids.
        ids = dict(listed) if isinstance(listed, dict) else _numbered(listed)
        ids |= {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise wrong_shape_of_json(path, "a vocabulary") from None
    if not ids or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise wrong_shape_of_json(path, "a vocabulary of ids")
    return ids


def num_tokens(path: Path) -> int:
    """One more than the largest id that is a token; rows of a head behind it are padding."""
    return 1 + max(token_ids(path).values())


def tokenizer_file(folder: Path, tokenizer_path: str | Path | None = None) -> Path:
    """tokenizer.json of ``folder``, or the one that ``--tokenizer-path`` names instead.

    Raises:
        CheckpointError: there is none; other files do not name every token's id.
    """
    path = Path(folder if tokenizer_path is None else tokenizer_path)
    path = path / FILE_NAME if path.suffix != ".json" else path
    if not path.exists():
        raise CheckpointError(
            f"{shown(path)} is missing, by which it is known whether target and draft model have "
            "the same tokens; save the tokenizer with transformers, which writes it"
        )
    return path


def refuse_other_tokens(target: Path, draft: Path, draft_flag: str) -> None:
    """Of two files tokenizer.json: a drafted id must be the token that the target calls so.

    Raises:
        CheckpointError: some token has another id, or only one of them has it.
    """
    of_target, of_draft = token_ids(target), token_ids(draft)
    others = of_target.items() ^ of_draft.items()
    if others:
        token = min(token for token, _ in others)
        raise CheckpointError(
            f"{draft_flag} {shown(draft.parent)} has another vocabulary than the target "
            f"({len({token for token, _ in others})} tokens differ, such as {shown(repr(token))}: "
            f"{of_draft.get(token, 'none')} and {of_target.get(token, 'none')}); pass a model of "
            "the same tokenizer"
        )


def _numbered(listed: list[list[object]]) -> dict[str, int]:
    return {str(token): number for number, (token, _) in enumerate(listed)}
