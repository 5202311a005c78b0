"""Where training of a layer starts: at the target's own, or at the best linear map."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from sglang_ascend.training.data import Sequence, load_shards, shard_paths
from sglang_ascend.training.generation.origin import checked_fingerprint, fingerprint
from sglang_ascend.training.run_folder import CHECKPOINT, read_average, trained_for
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer, writes_residual

logger = logging.getLogger(__name__)
START_SHARDS = 8
# Of the target's final norm, what the last norm of a new layer begins with: drawn at random, or
# behind the best linear map.
RANDOM_NORM, LINEAR_NORM = 0.3, 0.7
PENALTY = 1e-2  # of a row, on the squares of the linear map

Tensor = torch.Tensor


def new_layer(target: Target, seed: int) -> MTPLayer:
    """An untrained layer, random but for its last norm."""
    layer = MTPLayer(target)
    layer.initialize(target.final_norm(), RANDOM_NORM, torch.Generator().manual_seed(seed))
    return layer


def own_layer(target: Target) -> MTPLayer:
    """The layer that the checkpoint holds. Raises CheckpointError: it holds none, or a part."""
    target.check_own_layer()
    layer = MTPLayer(target)
    layer.from_checkpoint(target.mtp_tensors())
    return layer


def started_layer(target: Target, data: Path, out: Path, seed: int, from_scratch: bool) -> MTPLayer:
    """The checkpoint's own layer or, where it has none or `from_scratch`, a new one after
    `ridge_start` on the first shards of `data`. Where `out` holds a trainer's checkpoint, whose
    weights will be taken, neither is read.

    Raises:
        ValueError: another target wrote a shard of `data`, or `out` is of another's layer.
    """
    own = checked_fingerprint(target, shard_paths(data))
    if (out / CHECKPOINT).exists():
        if trained_for(out) not in (None, own):
            raise ValueError(
                f"{out / CHECKPOINT} is of a layer of another model: name another --out."
            )
        return MTPLayer(target)
    if target.has_own_layer and not from_scratch:
        return own_layer(target)
    layer = new_layer(target, seed)
    embedding, _ = target.embedding_and_head()
    sequences = load_shards(shard_paths(data)[:START_SHARDS], embedding.shape[1])
    share = ridge_start(layer, sequences, embedding, target.final_norm())
    logger.info("the linear start explains %.1f %% of the next hidden", 100 * share)
    return layer


def trained_layer(target: Target, *runs: Path) -> MTPLayer:
    """The averaged weights of a trainer's folder, through bf16: that is what is served.

    Of several folders the mean: layers trained on from one start often draft better so than
    each alone (model soups, arXiv:2203.05482).

    Raises:
        FileNotFoundError: nothing was trained in a folder.
        ValueError: what was trained there is no layer of this target.
    """
    layer, own = MTPLayer(target), fingerprint(target)
    state, averages = layer.state_dict(), [read_average(run) for run in runs]
    for run, average in zip(runs, averages, strict=True):
        if _shapes(average) != _shapes(state) or trained_for(run) not in (None, own):
            raise ValueError(f"{run} holds no layer for {target.folder}: name its own --target.")
    layer.load_state_dict(
        {name: torch.stack([average[name] for average in averages]).mean(0) for name in state}
    )
    layer.from_checkpoint(layer.to_checkpoint())
    return layer


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


@torch.no_grad()
def ridge_start(
    layer: MTPLayer, sequences: list[Sequence], embedding: Tensor, target_norm: Tensor
) -> float:
    """Sets the projection to argmin_W sum |W x_i - y_i|^2 + n * PENALTY * |W|^2 and the last norm.

    x_i = `pair` of h_i and e_{i+1} is the projection's input at slot i, y_i = h_{i+1} / w is the
    target's next hidden before its final norm's weight w. With the residual branches near zero
    the layer's output is then LINEAR_NORM * w * norm(W x_i): a linear guess of h_{i+1}.

    Returns:
        the share of the variance of y that the linear map explains on the given data.
    """
    size, device = embedding.shape[1], embedding.device
    gram = torch.zeros(2 * size, 2 * size, dtype=torch.float64, device=device)
    cross = torch.zeros(2 * size, size, dtype=torch.float64, device=device)
    total, count = 0.0, 0
    for start in range(0, len(sequences), 32):
        group = sequences[start : start + 32]
        # A sequence's last hidden is unknown (zero): its last two slots have no target.
        hidden = torch.cat([part.hidden[:-2] for part in group]).to(device).float()
        following = torch.cat([part.hidden[1:-1] for part in group]).to(device).float()
        tokens = torch.cat([part.tokens[1:-1] for part in group]).to(device)
        inputs, wanted = layer.pair(hidden, embedding[tokens]), following / target_norm
        gram += (inputs.T @ inputs).double()
        cross += (inputs.T @ wanted).double()
        total += wanted.double().square().sum().item()
        count += len(tokens)
    gram += count * PENALTY * torch.eye(2 * size, dtype=torch.float64, device=device)
    solution = torch.linalg.solve(gram, cross)  # [2 size, size]
    layer.projection.weight.copy_(solution.T)
    layer.final_norm.weight.copy_(target_norm * LINEAR_NORM)
    for name, parameter in layer.named_parameters():
        if writes_residual(name) and parameter.dim() >= 2:
            parameter.mul_(0.1)
    return (solution * cross).sum().item() / total
