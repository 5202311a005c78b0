"""What serving a model asks of the step beside its tensors, and the step has not.

The step verifies K + 1 rows and drafts behind the accepted ones. It keeps keys and values of every
position and nothing else, every row sees all positions before it, and a position is one number.
What a model asks is read from its config.json; by name is known only what that does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from sglang_ascend.checkpoint.config import ModelConfig

STATE = "a recurrent state that goes back to the last accepted token"
WINDOW = "attention over a sliding window"
CHUNKS = "attention in chunks of the context"
INDEXED = "attention over tokens that an index chooses"
AXES = "positions of several axes"
TWO_ATTENTIONS = "two attentions in a layer"
TENSORS = "the names and shapes of its tensors, which this package has not learned"

# Kinds of layers, by the names of transformers and of the models' own configs.
_KINDS = {
    STATE: ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"),
    WINDOW: ("sliding_attention",),
    CHUNKS: ("chunked_attention",),
    INDEXED: (
        "indexed_attention",
        "deepseek_sparse_attention",
        "qwen_sparse_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ),
}
_LISTS_OF_KINDS = ("layer_types", "layers_block_type", "hybrid_layers_types_block")
# A field, what it must be, and what the model then asks for.
_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("full_attention_interval", lambda every: every != 1, STATE),  # the layers between are linear
    ("layer_group_size", lambda size: size != 1, STATE),
    ("linear_attn_config", bool, STATE),
    ("linear_conv_kernel_dim", bool, STATE),
    ("hybrid_override_pattern", lambda pattern: "M" in str(pattern), STATE),
    ("use_sliding_window", bool, WINDOW),
    ("sliding_window_pattern", bool, WINDOW),
    ("hybrid_layer_pattern", bool, WINDOW),
    ("local_layer_ids", bool, WINDOW),
    ("dual_chunk_attention_config", bool, CHUNKS),
    ("index_topk", bool, INDEXED),
    ("mrope_section", bool, AXES),
)
# Models whose MTP layer SGLang 0.5.23 has a class for (configs/model_config.py and models/).
BY_NAME = {
    "LongcatFlashForCausalLM": TWO_ATTENTIONS,
    "BailingMoeForCausalLM": TENSORS,
    "BailingMoeV2ForCausalLM": TENSORS,
}
# Targets whose layers exchange rows under data-parallel attention, as tests show.
EXCHANGE_ROWS = ("DeepseekV3ForCausalLM",)


def missing_capability(config: ModelConfig, served: Collection[str] = ()) -> str | None:
    """What the model needs and is not served, and which field says so; None if it needs nothing.

    `served` are capabilities that the device's worker has all the same.
    """
    for fields in _with_parts(config.fields):
        for field, what in _asked(fields):
            if what not in served:
                return f"{what} ({field} in config.json)"
    return BY_NAME.get(config.architecture)


def _with_parts(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The fields, and those of their parts that say something of the language model."""
    yield fields
    for part in ("text_config", "llm_config", "rope_parameters", "rope_scaling"):
        if isinstance(fields.get(part), Mapping):
            yield from _with_parts(fields[part])


def _asked(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field that asks for something, and for what."""
    for field in _LISTS_OF_KINDS:
        kinds = fields.get(field)
        if isinstance(kinds, list):
            yield from ((field, what) for what, of in _KINDS.items() for k in kinds if k in of)
    for field, asks, what in _FIELDS:
        value = fields.get(field)
        if value is not None and asks(value):
            yield field, what
