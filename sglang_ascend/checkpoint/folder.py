"""Whether a flag names a checkpoint folder on this machine, and whether a tokenizer lies in it."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.reader import read_json_object

# A repository of a model hub: organisation/name.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Any one of these sets of files makes a tokenizer; tokenizer_config.json alone has no vocabulary.
TOKENIZER_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tiktoken.model",),
    ("tekken.json",),
)
# Weights, configs, and all that makes words of tokens.
MODEL_FILES = (
    *("*.safetensors", "*config.json", "tokenizer*", "*.model", "*.tiktoken", "tekken.json"),
    *("vocab*", "merges*", "special_tokens_map*", "added_tokens*", "chat_template*"),
)


def local_folder(path: str | Path, flag: str) -> Path | None:
    """The folder that `flag` names, or None for a hub id or an URL, which SGLang may download.

    Raises:
        CheckpointError: `path` is a file, or looks like a local path and does not exist.
    """
    folder = Path(path)
    try:
        if folder.is_dir():
            return folder
        exists = folder.exists()
        owner_is_local = folder.parent != Path() and folder.parent.exists()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{flag} {shown(path)} cannot be read; pass a folder that this user may open"
        ) from error
    if exists:
        raise CheckpointError(
            f"{flag} {shown(path)} is a file; pass the folder that holds config.json and "
            "the .safetensors files"
        )
    is_remote = "://" in str(path) or HUB_ID.fullmatch(str(path)) is not None
    if is_remote and not owner_is_local:
        return None
    raise CheckpointError(
        f"{flag} {shown(path)} does not exist; pass the folder of a checkpoint, "
        "or a hub id such as organisation/name"
    )


def model_files(folder: Path) -> list[Path]:
    """What decides the text of the model in `folder`; a README does not."""
    found = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def let_others_read(folder: Path) -> None:
    """The files of `folder`: safetensors writes some that only their owner may read."""
    for path in folder.iterdir():
        path.chmod(0o644)


def has_tokenizer(folder: Path) -> bool:
    """Whether a vocabulary lies in `folder`."""
    held = any(all((folder / name).exists() for name in names) for names in TOKENIZER_FILES)
    return held or any(folder.glob("*.tiktoken"))


def check_tokenizer(folder: Path, tokenizer_path: str | Path | None) -> None:
    """Refuses a checkpoint that SGLang could not tokenize for; a remote tokenizer is not checked.

    Raises:
        CheckpointError: no vocabulary in `folder` (or in `tokenizer_path`, if given), or a
            tokenizer.json that is no JSON object.
    """
    if tokenizer_path is not None:
        if str(tokenizer_path).endswith(".json") and Path(tokenizer_path).is_file():
            read_json_object(Path(tokenizer_path))
            return
        local = local_folder(tokenizer_path, "--tokenizer-path")
        if local is None:
            return
        folder = local
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{shown(folder)} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json "
            "with merges.txt); add one, pass another folder as --tokenizer-path, or serve token "
            "ids with --skip-tokenizer-init"
        )
    if (folder / "tokenizer.json").exists():
        read_json_object(folder / "tokenizer.json")
