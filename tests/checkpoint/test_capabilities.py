"""Invariant: a model that asks for what the step has not is refused by that and by the field of its
config.json that asks, whatever its family; one that has the field and does not ask is accepted.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint

STATE = "a recurrent state that goes back to the last accepted token"
WINDOW = "attention over a sliding window"
CHUNKS = "attention in chunks of the context"
INDEXED = "attention over tokens that an index chooses"
AXES = "positions of several axes"
FULL = ["full_attention", "full_attention"]

# The field, what a value of it asks for, and a value that asks for nothing.
CASES: tuple[tuple[str, str, Any, Any], ...] = (
    ("layer_types", STATE, ["linear_attention", "full_attention"], FULL),
    ("layer_types", WINDOW, ["full_attention", "sliding_attention"], FULL),
    ("layer_types", CHUNKS, ["full_attention", "chunked_attention"], FULL),
    ("layer_types", INDEXED, ["full_attention", "indexed_attention"], FULL),
    ("layers_block_type", STATE, ["mamba", "attention"], ["attention", "attention"]),
    ("hybrid_layers_types_block", WINDOW, ["sliding_attention"], ["full_attention"]),
    ("full_attention_interval", STATE, 4, 1),
    ("layer_group_size", STATE, 8, 1),
    ("linear_attn_config", STATE, {"kda_layers": [1]}, None),
    ("linear_conv_kernel_dim", STATE, 4, None),
    ("hybrid_override_pattern", STATE, "M-M*", "-*-*"),
    ("use_sliding_window", WINDOW, True, False),
    ("sliding_window_pattern", WINDOW, "LLLG", None),
    ("hybrid_layer_pattern", WINDOW, [0, 1], None),
    ("local_layer_ids", WINDOW, [1], []),
    ("dual_chunk_attention_config", CHUNKS, {"chunk_size": 8192}, None),
    ("index_topk", INDEXED, 2048, None),
    ("mrope_section", AXES, [8, 12, 12], None),
)
# Where a config has it: alone, in the config of the text model, among the rotation's parameters.
PLACES = {
    "alone": lambda field, value: {field: value},
    "text": lambda field, value: {"text_config": {field: value}},
    "rotation": lambda field, value: {"rope_parameters": {"rope_type": "default", field: value}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("field", "what", "asking", "not_asking"), CASES)
def test_a_model_is_refused_by_what_it_asks_for(
    build, field: str, what: str, asking: Any, not_asking: Any, place: str
) -> None:
    checkpoint = build("mimo")
    checkpoint.config |= PLACES[place](field, not_asking)
    checkpoint.save()
    assert validate_checkpoint(checkpoint.folder) is not None

    checkpoint.config |= PLACES[place](field, asking)
    checkpoint.save()
    with pytest.raises(CheckpointError) as refusal:
        validate_checkpoint(checkpoint.folder)
    reason = f"that needs {what} ({field} in config.json); leave out --speculative-algorithm"
    assert str(refusal.value).endswith(reason)


def test_a_window_that_is_not_used_is_no_window(build) -> None:
    """As published Qwen2s and MiMos have it."""
    checkpoint = build("mimo")
    checkpoint.config |= {"sliding_window": 32768, "max_window_layers": 28}
    checkpoint.save()
    assert validate_checkpoint(checkpoint.folder) is not None


def test_what_another_worker_has_is_not_missing(build) -> None:
    """As of DeepSeek-V3.2 where SGLang's own worker serves."""
    checkpoint = build("deepseek")
    checkpoint.config |= {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}
    checkpoint.save()
    assert validate_checkpoint(checkpoint.folder, served=[INDEXED]) is not None
    for served in ((), (WINDOW,)):
        with pytest.raises(CheckpointError, match=r"\(index_topk in config\.json\)"):
            validate_checkpoint(checkpoint.folder, served=served)


def test_a_target_without_an_mtp_layer_of_its_own_is_asked_too(build) -> None:
    target, draft = build("mimo", "target"), build("mimo", "draft")
    target.config |= {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    target.save()
    with pytest.raises(CheckpointError, match=r"^--model-path .* is a Qwen2ForCausalLM, .* window"):
        validate_checkpoint(target.folder, draft.folder)
