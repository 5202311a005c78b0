"""A small MiMo of random weights whose heads have 128 columns, as published models have."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_targets import write_target

VOCABULARY, WIDTH = 1024, 512
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_attention_heads": 4,  # over two of keys
    "initializer_range": 0.08,
    "num_nextn_predict_layers": 1,
}
NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")


def build(folder: Path) -> None:
    """The MTP layer is a copy of the last one, fed by the token, and by a bit of the state."""
    file = write_target(folder, "MiMoForCausalLM", **CONFIG) / "model.safetensors"
    weights = load_file(file)
    last, new = "model.layers.1.", "model.mtp_layers.0."
    layer = {
        name.replace(last, new): weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    ones = torch.ones(WIDTH, dtype=torch.bfloat16)
    layer |= {f"{new}{norm}.weight": ones.clone() for norm in NORMS}
    state, token = 0.05 * torch.randn(WIDTH, WIDTH), torch.eye(WIDTH)
    layer[f"{new}input_proj.weight"] = torch.cat((state, token), 1).to(torch.bfloat16)
    save_file(weights | layer, file, metadata={"format": "pt"})
