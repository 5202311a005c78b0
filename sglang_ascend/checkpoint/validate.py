"""Refuses, before SGLang loads anything, a checkpoint that MTP could not serve.

Reads config.json, the safetensors headers and, up to a size limit, every value; runs no code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_ascend.checkpoint.capabilities import missing_capability
from sglang_ascend.checkpoint.config import ModelConfig, read_config, refuse_remote_code
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.families import (
    FAMILIES,
    Family,
    find_family,
    mtp_prefix,
    mtp_tensors,
    target_tensors,
)
from sglang_ascend.checkpoint.folder import check_tokenizer, local_folder
from sglang_ascend.checkpoint.reader import TensorEntry
from sglang_ascend.checkpoint.shards import read_tensors
from sglang_ascend.checkpoint.tensors import (
    check_complete,
    check_shapes,
    missing_tensors,
    modules_of,
)
from sglang_ascend.checkpoint.values import refuse_all_zero, refuse_not_finite

MODEL_FLAG = "--model-path"
DRAFT_FLAG = "--speculative-draft-model-path"
SCAN_LIMIT_BYTES = 4 << 30


@dataclass(frozen=True)
class CheckpointSummary:
    """What was found: the architecture, where the MTP layer lies, and how much was read."""

    model_path: Path
    architecture: str
    mtp_path: Path | None
    num_tensors: int
    num_mtp_tensors: int
    num_bytes: int
    num_bytes_scanned: int
    quantized: bool


@dataclass(frozen=True)
class OpenedCheckpoint:
    """One opened folder; `flag` is what the user would change, headers only are read."""

    flag: str
    folder: Path
    config: ModelConfig
    family: Family | None
    tensors: Mapping[str, TensorEntry]
    quantized_modules: frozenset[str]


def validate_checkpoint(
    model_path: str | Path,
    draft_path: str | Path | None = None,
    *,
    tokenizer_path: str | Path | None = None,
    skip_tokenizer_init: bool = False,
    trust_remote_code: bool = False,
    scan_limit_bytes: int = SCAN_LIMIT_BYTES,
    served: Collection[str] = (),
) -> CheckpointSummary | None:
    """Checks the target in `model_path` and the MTP layer in it, or in `draft_path` if given.

    Every value is scanned for NaN and infinity when the target takes at most `scan_limit_bytes`
    (4 GiB); of a larger one the MTP layer, and of an MTP layer larger than that all but its routed
    experts. Returns None when `model_path` is no local folder but a hub id: SGLang may download
    it. A remote `draft_path` leaves its MTP layer unchecked. `served` are capabilities (see
    capabilities.py) that the worker has beside those of this package's step.

    Raises:
        CheckpointError: one sentence with the file or flag at fault and the remedy.
    """
    target_folder = local_folder(model_path, MODEL_FLAG)
    if target_folder is None:
        return None
    draft_folder = target_folder
    if draft_path is not None and Path(draft_path) != Path(model_path):
        draft_folder = local_folder(draft_path, DRAFT_FLAG)
    has_own_mtp = draft_folder == target_folder

    target = open_checkpoint(MODEL_FLAG, target_folder, has_own_mtp, trust_remote_code, served)
    if not skip_tokenizer_init:
        check_tokenizer(target_folder, tokenizer_path)
    check_target(target)
    mtp: list[TensorEntry] = []
    if draft_folder is not None:
        draft = target
        if not has_own_mtp:
            draft = open_checkpoint(DRAFT_FLAG, draft_folder, True, trust_remote_code, served)
        mtp = _check_mtp_layer(draft)
        if draft is not target:
            _check_same_width(target, draft)
    scanned = _tensors_to_scan(list(target.tensors.values()), mtp, scan_limit_bytes)
    return CheckpointSummary(
        model_path=target_folder,
        architecture=target.config.architecture,
        mtp_path=draft_folder,
        num_tensors=len(target.tensors),
        num_mtp_tensors=len(mtp),
        num_bytes=num_bytes(target.tensors.values()),
        num_bytes_scanned=refuse_not_finite(scanned),
        quantized=target.config.quantized,
    )


def _tensors_to_scan(
    target: list[TensorEntry], mtp: list[TensorEntry], limit: int
) -> set[TensorEntry]:
    """What can be read in seconds: all of it, the MTP layer, or that without its experts."""
    if num_bytes(target) <= limit:
        return {*target, *mtp}
    if num_bytes(mtp) <= limit:
        return set(mtp)
    return {tensor for tensor in mtp if ".experts." not in tensor.name}


def num_bytes(tensors: Iterable[TensorEntry]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def open_checkpoint(
    flag: str, folder: Path, needs_mtp: bool, trust_remote_code: bool, served: Collection[str]
) -> OpenedCheckpoint:
    """Config and headers of one checkpoint; its family must be known if it is to hold the MTP."""
    config = read_config(folder)
    _refuse_missing_capability(flag, config, served)
    family = _family(flag, config) if needs_mtp else find_family(config)
    if family and flag == MODEL_FLAG and config.architecture == family.draft_architecture:
        raise CheckpointError(
            f"{flag} {shown(folder)} is a {config.architecture}, an MTP layer without its model; "
            f"pass the model as {flag} and this folder as {DRAFT_FLAG}"
        )
    refuse_remote_code(config, family.model_types if family else None, trust_remote_code)
    tensors = read_tensors(folder)
    quantized_modules = modules_of(tensors) if config.quantized else frozenset()
    return OpenedCheckpoint(flag, folder, config, family, tensors, quantized_modules)


def _refuse_missing_capability(flag: str, config: ModelConfig, served: Collection[str]) -> None:
    """Of any model, for the step runs the target too."""
    if (what := missing_capability(config, served)) is not None:
        raise CheckpointError(
            f"{flag} {shown(config.path.parent)} is a {shown(config.architecture)}, which MTP does "
            f"not serve: that needs {what}; leave out --speculative-algorithm"
        )


def _family(flag: str, config: ModelConfig) -> Family:
    family = find_family(config)
    if family is not None:
        return family
    known = ", ".join(family.architecture for family in FAMILIES)
    remedy = f"pass a checkpoint with an MTP layer, or the folder of one as {DRAFT_FLAG}"
    if flag == DRAFT_FLAG:
        remedy = (
            "pass a folder with an MTP layer; an EAGLE draft is served on CUDA and NPU alone, by "
            "--speculative-algorithm EAGLE"
        )
    raise CheckpointError(
        f"{flag} {shown(config.path.parent)} is a {shown(config.architecture)}, for which no MTP "
        f"layer is known (known are {known}); {remedy}"
    )


def check_target(target: OpenedCheckpoint) -> None:
    """Presence and shape of the target's tensors; an unknown family is left to SGLang."""
    if target.family is None:
        return
    check_complete(
        f"{target.flag} {shown(target.folder)}",
        target_tensors(target.family, target.config),
        target.tensors,
        target.quantized_modules,
        target.config,
    )


def _check_mtp_layer(draft: OpenedCheckpoint) -> list[TensorEntry]:
    """The tensors of the MTP layer, all there and of the right shape, its projection not zero."""
    family = _family(draft.flag, draft.config)
    prefix = mtp_prefix(family, draft.config)
    held = [tensor for name, tensor in draft.tensors.items() if name.startswith(prefix)]
    _check_num_mtp_layers(draft, has_tensors=bool(held))
    expected = mtp_tensors(family, draft.config)
    missing = missing_tensors(expected, draft.tensors, draft.quantized_modules)
    if missing:
        num_required = sum(not e.optional for e in expected)
        raise CheckpointError(
            f"{draft.flag} {shown(draft.folder)} lacks {len(missing)} of the {num_required} "
            f"tensors of its MTP layer (first {shown(missing[0])}); {_mtp_remedy(draft)}"
        )
    check_shapes(expected, draft.tensors, draft.config)
    projection = draft.tensors.get(prefix + family.projection)
    if projection is not None:
        refuse_all_zero(projection)
    return held


def _check_num_mtp_layers(draft: OpenedCheckpoint, has_tensors: bool) -> None:
    field = "num_nextn_predict_layers"
    if not draft.config.fields.get(field):
        remedy = f'set "{field}": 1' if has_tensors else _mtp_remedy(draft)
        raise CheckpointError(
            f"{shown(draft.config.path)} declares no MTP layer ({field} is missing or 0); {remedy}"
        )
    if draft.config.size(field) != 1:
        raise CheckpointError(
            f"{shown(draft.config.path)} declares {draft.config.size(field)} MTP layers and SGLang "
            f'loads one; set "{field}": 1 and keep the first'
        )


def _mtp_remedy(draft: OpenedCheckpoint) -> str:
    if draft.flag == DRAFT_FLAG:
        return "pass a folder that holds a complete MTP layer"
    return f"pass a checkpoint with a complete MTP layer, or the folder of one as {DRAFT_FLAG}"


def _check_same_width(target: OpenedCheckpoint, draft: OpenedCheckpoint) -> None:
    """The MTP layer reads the target's hidden states and shares its embedding and head."""
    for field in ("hidden_size", "vocab_size"):
        if target.config.size(field) != draft.config.size(field):
            raise CheckpointError(
                f"{DRAFT_FLAG} {shown(draft.folder)} has {field} {draft.config.size(field)} and "
                f"the target has {target.config.size(field)}; pass an MTP layer of the same model"
            )
