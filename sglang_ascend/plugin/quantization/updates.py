"""Updates of weights that a server with quantized linears, or one without, cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.quantization.head import QuantizedHead
from sglang_ascend.plugin.quantization.linear import QuantizedLinear
from sglang_ascend.plugin.quantization.loading import quantized_checkpoint
from sglang_ascend.plugin.requests.draft_heads.lists import ListedHeads
from sglang_ascend.quantization.weight import HEAD


def refused_folder(model: torch.nn.Module, folder: str) -> str | None:
    """Why ``model`` cannot take the weights of ``folder``, if its headers tell that."""
    if not device_profile().emulates:
        return _captured(model)
    try:
        checkpoint = quantized_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    if checkpoint is None:
        return None
    if not _has(model, QuantizedLinear):
        return f"{shown(folder)} is quantized and this server's layers are float: start one of it."
    if HEAD in checkpoint.schemes and not _has_quantized_head(model):
        return f"{shown(folder)} has a quantized head and this server's is float: start one of it."
    return None


def refused_tensors(model: torch.nn.Module) -> str | None:
    """Why ``model`` cannot take weights one by one: its products are made of complete layers."""
    if not _has(model, QuantizedLinear) or _captured(model):
        return _captured(model)
    return "the linears of this server are quantized: update them by /update_weights_from_disk."


def _captured(model: torch.nn.Module) -> str | None:
    """Quantized weights are prepared anew, elsewhere: a captured step would go on with the old."""
    if not device_profile().captures_step or not _has(model, QuantizedLinear):
        return None
    return "quantized weights are not updated where the step is captured: start a server of them."


def _has_quantized_head(model: torch.nn.Module) -> bool:
    """Its own, or the target's, of which an MTP layer has rows."""
    listed = [method for method in _methods(model) if isinstance(method, ListedHeads)]
    heads = (method.target_head.quant_method for method in listed)
    return _has(model, QuantizedHead) or any(isinstance(head, QuantizedHead) for head in heads)


def _has(model: torch.nn.Module, method: type) -> bool:
    return any(isinstance(found, method) for found in _methods(model))


def _methods(model: torch.nn.Module) -> Iterator[Any]:
    return (getattr(module, "quant_method", None) for module in model.modules())
