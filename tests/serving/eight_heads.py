"""nano-deepseek with eight attention heads, which two ranks share and four do: its six do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HEADS_TWICE = 2


def write_with_eight_heads(source: Path, folder: Path) -> Path:
    """The same function: the first two heads are there twice, each time with half of what they
    add. bfloat16 halves exactly."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    num_heads = config["num_attention_heads"]
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight")):
            heads = weight.unflatten(0, (num_heads, -1))
            tensors[name] = torch.cat([heads, heads[:HEADS_TWICE]]).flatten(0, 1)
        elif name.endswith("self_attn.o_proj.weight"):
            heads = weight.unflatten(1, (num_heads, -1))
            halves = heads[:, :HEADS_TWICE] / 2
            tensors[name] = torch.cat([halves, heads[:, HEADS_TWICE:], halves], 1).flatten(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("num_attention_heads", "num_key_value_heads"):
        config[name] = num_heads + HEADS_TWICE
    (folder / "config.json").write_text(json.dumps(config))
    return folder
