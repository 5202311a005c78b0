"""The linears of a float model by one cell of the grid, in memory."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.ptq.calibration import quantize_linear, walked
from sglang_ascend.ptq.layers import Layers, linears
from sglang_ascend.quantization.recipe import QConfig
from sglang_ascend.quantization.weight import QuantizedWeight


def matching(layers: Layers, include: str) -> list[str]:
    """The decoder layers' linears whose names match the glob `include`.

    Raises:
        CheckpointError: there is none.
    """
    found = [
        layers.prefix(number) + name
        for number in range(layers.num_layers)
        for name, _ in linears(layers.skeleton(number))
        if fnmatchcase(layers.prefix(number) + name, include)
    ]
    if not found:
        raise CheckpointError(
            f"no linear of {shown(layers.target.folder)} matches {shown(include)}; write a glob of "
            "names such as model.layers.0.self_attn.o_proj"
        )
    return found


@torch.inference_mode()
def solve(
    layers: Layers,
    scheme: QConfig,
    include: str,
    tokens: list[Tensor],
    shown_as: Callable[[Tensor], Tensor] = lambda inputs: inputs,
) -> dict[str, QuantizedWeight]:
    """The decoder layers' linears that `include` matches, by `scheme`; the MTP layer stays float.

    Args:
        tokens: of the calibration text, which float layers read; unread where nothing calibrates.
        shown_as: what is made of the inputs [rows, in] of a linear before they are used.
    """
    names = matching(layers, include)
    wanted: dict[int, list[str]] = {}
    for number in range(layers.num_layers):
        prefix = layers.prefix(number)
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if inside:
            wanted[number] = inside
    recorded = wanted if scheme.calibrated else dict.fromkeys(wanted, ())
    found = {}
    for number, layer, inputs in walked(layers, tokens, recorded):
        for name in wanted[number]:
            linear, seen = layer.get_submodule(name), inputs.of(name)
            assert isinstance(linear, nn.Linear)
            seen = None if seen is None else shown_as(seen)
            fitting = scheme.fitting(linear.in_features)
            found[layers.prefix(number) + name] = quantize_linear(linear, fitting, seen)
    return found
