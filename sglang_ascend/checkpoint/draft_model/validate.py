"""Refuses, before SGLang loads anything, a draft model that could not draft for the target."""

from __future__ import annotations

from pathlib import Path

from sglang_ascend.checkpoint.draft_model.vocabulary import refuse_other_tokens, tokenizer_file
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.folder import local_folder
from sglang_ascend.checkpoint.validate import (
    DRAFT_FLAG,
    MODEL_FLAG,
    SCAN_LIMIT_BYTES,
    OpenedCheckpoint,
    check_target,
    num_bytes,
    open_checkpoint,
)
from sglang_ascend.checkpoint.values import refuse_not_finite

# Architectures that were served as a draft model, and the model_type that builds each.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def validate_draft_model(
    model_path: str | Path,
    draft_path: str | Path | None,
    *,
    tokenizer_path: str | Path | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Checks the target in `model_path`, and the causal language model in `draft_path`.

    Both must be folders of this machine whose tokenizer.json give every token the same id. Values
    are scanned for NaN and infinity in a checkpoint of at most `SCAN_LIMIT_BYTES`.

    Raises:
        CheckpointError: one sentence with the file or flag at fault and the remedy.
    """
    if draft_path is None:
        raise CheckpointError(
            "--speculative-algorithm STANDALONE drafts with a model of its own; pass the folder of "
            f"a small one, of the target's tokenizer, as {DRAFT_FLAG}"
        )
    target, draft = (
        open_checkpoint(flag, _folder(path, flag), False, trust_remote_code, ())
        for flag, path in ((MODEL_FLAG, model_path), (DRAFT_FLAG, draft_path))
    )
    _check_served(draft)
    for checkpoint in (target, draft):
        if checkpoint.config.quantized:
            raise CheckpointError(
                f"{checkpoint.flag} {shown(checkpoint.folder)} is quantized, which was not tried "
                "with a draft model; pass the checkpoint that it was made from"
            )
    refuse_other_tokens(
        tokenizer_file(target.folder, tokenizer_path), tokenizer_file(draft.folder), DRAFT_FLAG
    )
    check_target(target)
    for checkpoint in (target, draft):
        if num_bytes(checkpoint.tensors.values()) <= SCAN_LIMIT_BYTES:
            refuse_not_finite(checkpoint.tensors.values())


def _folder(path: str | Path, flag: str) -> Path:
    folder = local_folder(path, flag)
    if folder is None:
        raise CheckpointError(
            f"{flag} {shown(path)} is no folder of this machine, and STANDALONE compares two "
            "tokenizers before it starts; download it and pass the folder"
        )
    return folder


def _check_served(draft: OpenedCheckpoint) -> None:
    architecture = draft.config.architecture
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{DRAFT_FLAG} {shown(draft.folder)} is a {shown(architecture)}, and draft models are "
            f"{', '.join(ARCHITECTURES)}; pass one of these, or an MTP layer with "
            "--speculative-algorithm MTP"
        )
    model_type = draft.config.text("model_type")
    if model_type != ARCHITECTURES[architecture]:
        raise CheckpointError(
            f"{shown(draft.config.path)} has model_type {shown(model_type)}; set it to "
            f"{ARCHITECTURES[architecture]}, which builds a {architecture}"
        )
