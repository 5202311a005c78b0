"""A start for the MTP layer that already predicts: the best linear map, by ridge regression."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_ascend.training.data import Sequence, load_shards
from sglang_ascend.training.mtp_mimo import MiMoMTP, new_layer

logger = logging.getLogger(__name__)
START_SHARDS = 8

Tensor = torch.Tensor


@torch.no_grad()
def ridge_start(
    layer: MiMoMTP,
    sequences: list[Sequence],
    embedding: Tensor,
    target_norm: Tensor,
    penalty: float = 1e-2,
    scale: float = 0.7,
) -> float:
    """Sets `input_proj` to argmin_W sum |W x_i - y_i|^2 + n * penalty * |W|^2 and the last norm.

    x_i = [norm(h_i), norm(e_{i+1})] are the projection's inputs at slot i, y_i = h_{i+1} / w is the
    target's next hidden before its final norm's weight w. With the residual branches near zero
    the layer's output is then `scale` * w * norm(W x_i): a linear guess of h_{i+1}.

    Returns:
        the share of the variance of y that the linear map explains on the given data.
    """
    size = layer.config.hidden_size
    gram = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    cross = torch.zeros(2 * size, size, dtype=torch.float64)
    total, count = 0.0, 0
    for start in range(0, len(sequences), 32):
        group = sequences[start : start + 32]
        # A sequence's last hidden is unknown (zero): its last two slots have no target.
        hidden = torch.cat([part.hidden[:-2].float() for part in group])
        following = torch.cat([part.hidden[1:-1].float() for part in group])
        tokens = torch.cat([part.tokens[1:-1] for part in group])
        pair = [layer.hidden_layernorm(hidden), layer.token_layernorm(embedding[tokens])]
        inputs, wanted = torch.cat(pair, -1), following / target_norm
        gram += (inputs.T @ inputs).double()
        cross += (inputs.T @ wanted).double()
        total += wanted.double().square().sum().item()
        count += len(tokens)
    gram += count * penalty * torch.eye(2 * size, dtype=torch.float64)
    solution = torch.linalg.solve(gram, cross)  # [2 size, size]
    layer.input_proj.weight.copy_(solution.T.float())
    layer.final_layernorm.weight.copy_(target_norm * scale)
    for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        matrix.mul_(0.1)
    return (solution * cross).sum().item() / total


def started_layer(folder: Path, data: Path, out: Path, seed: int) -> tuple[MiMoMTP, Tensor]:
    """A new layer after `ridge_start` on the first shards of `data`, and the target's embedding.

    Where `out` holds a trainer's checkpoint the regression is left out: the weights come from it.
    """
    layer, embedding = new_layer(folder, seed)
    if not (out / "checkpoint.safetensors").exists():
        paths = sorted(data.glob("*.safetensors"))[:START_SHARDS]
        norm = load_file(folder / "model.safetensors")["model.norm.weight"].float()
        share = ridge_start(layer, load_shards(paths), embedding, norm)
        logger.info("the linear start explains %.1f %% of the next hidden", 100 * share)
    return layer, embedding
