"""SGLang loaded once per test process with our plugin in place, and a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 24, 3, 1, 40, 50
HEAD_DIM = HIDDEN // HEADS


def decoder_layer() -> dict[str, tuple[int, ...]]:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "self_attn.q_proj.weight": (query, HIDDEN),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.weight": (key, HIDDEN),
        "self_attn.k_proj.bias": (key,),
        "self_attn.v_proj.weight": (key, HIDDEN),
        "self_attn.v_proj.bias": (key,),
        "self_attn.o_proj.weight": (HIDDEN, query),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }


def mimo_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of a one-layer MiMo with its MTP layer."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for name, shape in decoder_layer().items():
        shapes[f"model.layers.0.{name}"] = shapes[f"model.mtp_layers.0.{name}"] = shape
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"model.mtp_layers.0.{name}.weight"] = (HIDDEN,)
    shapes["model.mtp_layers.0.input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    return shapes


@pytest.fixture(scope="session")
def tiny_mimo(tmp_path_factory) -> Path:
    """A random checkpoint that SGLang can load, without tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-mimo")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in mimo_shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def loaded_plugins() -> None:
    """What every SGLang process does first. Importing SGLang takes seconds: once per session."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def cores_of_all(monkeypatch) -> None:
    """Several ranks would share the cores of this process, and of every server that it starts."""
    monkeypatch.setattr("sglang_ascend.plugin.mtp.ranks.share_machine", lambda num_ranks: None)
