"""The weights of a model by their shapes: the bytes of its files, and what serving multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import prod

from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.families import Family, find_family, mtp_tensors, target_tensors
from sglang_ascend.checkpoint.layers import EXPERT, FUSED_EXPERTS, Expected
from sglang_ascend.quantization.qconfig import QConfig, layout_of
from sglang_ascend.quantization.recipe import Recipe, read_recipe
from sglang_ascend.quantization.weight import HEAD
from sglang_ascend.speculative.vocabulary.file import read_draft_vocabulary

FLOAT = "bf16"
FLOAT_BYTES = 2
FLOAT32_NAMES = ("e_score_correction_bias", "expert_bias")
# Linears of which every rank has all, and which stay float: the router (MoEGate or ReplicatedLinear
# in SGLang's models) and the projection of the MTP layer.
FLOAT_LINEARS = (
    "mlp.gate",
    "mlp.router.gate",
    "eh_proj",
    "input_proj",
    "mtp_linear_proj.0",
    "mtp.fc",
)
COPIED = (*FLOAT_LINEARS, "q_a_proj", "kv_a_proj_with_mqa")
ABSORBED = "kv_b_proj"  # of which SGLang's MLA keeps both halves as floats, beside the matrix
CUT_BY_COLUMNS = ("o_proj", "down_proj")  # RowParallelLinear, and an expert's second matrix
# What SGLang's models make one linear of, by its name there.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
}


class Share(StrEnum):
    """By what a tensor is divided."""

    WHOLE = "whole"
    HEADS = "heads"  # ranks of one attention group
    KEY_VALUE_HEADS = "key-value heads"  # the same, but no further than there are such heads
    RANKS = "ranks"
    VOCABULARY = "vocabulary"  # as heads; all ranks where attention has one group


@dataclass(frozen=True)
class Matrix:
    """One linear of the files, [rows, columns]; without a scheme it is float."""

    name: str  # behind the last dot
    rows: int
    columns: int
    share: Share
    scheme: QConfig | None

    @property
    def is_cut_by_columns(self) -> bool:
        return self.name in CUT_BY_COLUMNS


@dataclass(frozen=True)
class Layer:
    """What a server multiplies with one product.

    Attributes:
        matrices: of one linear the matrices that it joins; of experts those of each.
    """

    matrices: tuple[tuple[Matrix, ...], ...]
    has_experts: bool

    @property
    def quantized(self) -> set[tuple[str, QConfig]]:
        """Names and schemes of its matrices that are."""
        parts = {part for parts in set(self.matrices) for part in parts}
        return {(part.name, part.scheme) for part in parts if part.scheme}

    @property
    def is_cut_by_columns(self) -> bool:
        return any(part.is_cut_by_columns for part in self.matrices[0])


@dataclass(frozen=True)
class Weights:
    """All weights of a model, MTP layer included.

    Attributes:
        name: `bf16`, or a recipe's.
        layout: of the files.
        total_bytes: of the files.
        floats: bytes of a tensor and how it is shared, and how often there are such: of those that
            are in no layer below, and of what MLA absorbs.
        layers: those with a quantized matrix, and how often there are such.
        draft_head: rows of the head that one rank alone cuts out of it, for drafts of the folder's
            draft vocabulary.
    """

    name: str
    layout: str
    total_bytes: int
    floats: Counter[tuple[int, Share]]
    layers: Counter[Layer]
    draft_head: Layer | None

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> Weights:
        """
        Raises:
            CheckpointError: the model is of no served family.
            DraftVocabularyError: the folder's draft vocabulary is wrong.
            RecipeError: `name` is neither `bf16` nor a recipe.
        """
        recipe = None if name == FLOAT else read_recipe(name)
        found = list(tensors(_family(config), config))
        names = {tensor.name for tensor in found}
        if recipe is not None and recipe.head_scheme and f"{HEAD}.weight" not in names:
            (embedding,) = (t for t in found if t.name == "model.embed_tokens.weight")
            found.append(Expected(f"{HEAD}.weight", embedding.shape))  # no longer tied
        schemes = {tensor.name: recipe and _scheme(tensor, recipe) for tensor in found}
        layout = layout_of([scheme for scheme in schemes.values() if scheme])
        layers, total = Counter(), 0
        floats = Counter(
            (FLOAT_BYTES * prod(tensor.shape), share_of(tensor.name))
            for tensor in found
            if tensor.name.endswith(f"{ABSORBED}.weight")
        )
        for layer, members in _layers(found, schemes):
            sizes = [num_bytes(tensor, schemes[tensor.name], layout) for tensor in members]
            total += sum(sizes)
            if layer is None or not layer.quantized:
                floats.update(zip(sizes, (share_of(t.name) for t in members), strict=True))
            else:
                layers[layer] += 1
        return cls(name, layout, total, floats, layers, _draft_head(config, schemes))


def tensors(family: Family, config: ModelConfig) -> Iterator[Expected]:
    """All that a complete checkpoint holds; experts one by one."""
    fused = tuple(FUSED_EXPERTS.values())
    for part in (*target_tensors(family, config), mtp_tensors(family, config)):
        yield from (tensor for tensor in part if not tensor.name.endswith(fused))


def num_bytes(tensor: Expected, scheme: QConfig | None, layout: str) -> int:
    """Of one tensor in files of `layout`, in bf16 where it is float."""
    if scheme is None:
        return prod(tensor.shape) * (4 if tensor.name.endswith(FLOAT32_NAMES) else FLOAT_BYTES)
    return _quantized_bytes(_matrix(tensor, scheme), layout)


@cache  # a model has thousands of experts of two shapes
def _quantized_bytes(matrix: Matrix, layout: str) -> int:
    assert matrix.scheme is not None
    return matrix.scheme.without_values(matrix.rows, matrix.columns, layout).num_bytes


def _scheme(tensor: Expected, recipe: Recipe) -> QConfig | None:
    module, _, _ = tensor.name.rpartition(".")
    if not _is_linear(tensor) or module.endswith(FLOAT_LINEARS) or ".embed_tokens" in module:
        return None
    if module == HEAD:
        return recipe.head_scheme
    scheme = recipe.scheme(module)
    return scheme and scheme.fitting(tensor.shape[1])


def _draft_head(config: ModelConfig, schemes: dict[str, QConfig | None]) -> Layer | None:
    """Of one list of tokens: an NPU has no heads by language."""
    ids = read_draft_vocabulary(config.path.parent, config.size("vocab_size"))
    if ids is None:
        return None
    tensor = Expected(f"{HEAD}.weight", (len(ids), config.size("hidden_size")))
    return Layer(((_matrix(tensor, schemes.get(tensor.name)),),), has_experts=False)


def _is_linear(tensor: Expected) -> bool:
    return tensor.name.endswith(".weight") and len(tensor.shape) == 2


def _layers(
    found: list[Expected], schemes: dict[str, QConfig | None]
) -> Iterator[tuple[Layer | None, list[Expected]]]:
    """Each with its tensors; those that are no linears one by one."""
    layers: dict[tuple[str, str], dict[str, list[Expected]]] = {}
    for tensor in found:
        if not _is_linear(tensor):
            yield None, [tensor]
            continue
        parent, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        layer = EXPERT.sub(".experts.", f"{parent}."), FUSED.get(name, name)
        layers.setdefault(layer, {}).setdefault(parent, []).append(tensor)
    for (prefix, _), parts in layers.items():
        matrices = tuple(tuple(_matrix(t, schemes[t.name]) for t in of) for of in parts.values())
        layer = Layer(matrices, prefix.endswith(".experts."))
        yield layer, [tensor for of in parts.values() for tensor in of]


def _matrix(tensor: Expected, scheme: QConfig | None) -> Matrix:
    module = tensor.name.removesuffix(".weight")
    rows, columns = tensor.shape
    return Matrix(module.rpartition(".")[2], rows, columns, share_of(tensor.name), scheme)


def share_of(name: str) -> Share:
    """How SGLang's ranks share the tensor `name`."""
    module, _, _ = name.rpartition(".")
    if module in (HEAD, "model.embed_tokens"):
        return Share.VOCABULARY
    if name.endswith(FLOAT32_NAMES) or module.endswith(COPIED):
        return Share.WHOLE
    if "norm" in module or ".indexer." in name:
        return Share.WHOLE
    if module.endswith(("self_attn.k_proj", "self_attn.v_proj")):
        return Share.KEY_VALUE_HEADS
    if ".self_attn." in name:
        return Share.HEADS
    return Share.RANKS if ".mlp." in name else Share.WHOLE


def _family(config: ModelConfig) -> Family:
    family = find_family(config)
    if family is None:
        raise CheckpointError(
            f"{shown(config.path)} is of {shown(config.architecture)}, of which this package does "
            "not know the tensors; docs/features.md lists the families"
        )
    return family
