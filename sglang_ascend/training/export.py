"""A trained MTP layer under the names and in the dtype that SGLang's MiMo loader reads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

Tensor = torch.Tensor
PREFIX = "model.mtp_layers.0."


def checkpoint_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """bf16 tensors by checkpoint name, with the zero q/k/v biases that Qwen2 has.

    Raises:
        ValueError: a weight is not finite.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name} holds NaN or infinity: train again with a lower rate.")
        tensors[PREFIX + name] = weight.detach().to(torch.bfloat16).contiguous()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = torch.zeros(len(weight), dtype=torch.bfloat16)
            tensors[PREFIX + name.replace(".weight", ".bias")] = bias
    return tensors


def layer_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `checkpoint_tensors`: fp32 weights under the trainable layer's names."""
    return {
        name.removeprefix(PREFIX): tensor.float()
        for name, tensor in tensors.items()
        if name.startswith(PREFIX) and not name.endswith(".bias")
    }


def export(weights: dict[str, Tensor], path: Path) -> None:
    """Writes the servable layer to `path`, replacing it atomically."""
    temporary = path.with_suffix(".part")
    save_file(checkpoint_tensors(weights), temporary, metadata={"format": "pt"})
    temporary.rename(path)
