"""The linears of a float model by one cell of the grid, in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.ptq.calibration import quantize_linear, walked
from sglang_ascend.ptq.folding.smooth import folded, smoothings
from sglang_ascend.ptq.grid.cells import Cell
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.served import Emulated
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.quantization.solve import lut
from sglang_ascend.quantization.weight import QuantizedWeight
from sglang_ascend.training.targets.quantized import linears


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
    cell: Cell,
    include: str,
    tokens: list[Tensor],
    shown_as: Callable[[Tensor], Tensor] = lambda inputs: inputs,
) -> Weights:
    """The weights of `layers` with the decoder layers' linears that `include` matches by `cell`;
    the MTP layer stays float.

    Args:
        tokens: of the calibration text, which float layers read; unread where nothing calibrates.
        shown_as: what is made of the inputs [rows, in] of a linear before they are used.
    """
    wanted = by_layer(layers, matching(layers, include))
    if cell.smoothing is not None:
        layers = _smoothed(layers, cell, wanted, tokens)
    recorded = wanted if cell.sees_inputs else dict.fromkeys(wanted, ())
    found = {}
    for number, layer, inputs in walked(layers, tokens, recorded):
        for name in wanted[number]:
            linear, seen = layer.get_submodule(name), inputs.of(name)
            assert isinstance(linear, nn.Linear)
            seen = None if seen is None else shown_as(seen)
            found[layers.prefix(number) + name] = _solved(linear, cell, seen)
    return Weights(layers.weights.checkpoint, found)


def by_layer(layers: Layers, names: list[str]) -> dict[int, list[str]]:
    """`names` as they are inside each layer that has some."""
    found: dict[int, list[str]] = {}
    for number in range(layers.num_layers):
        prefix = layers.prefix(number)
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        found |= {number: inside} if inside else {}
    return found


def _smoothed(
    layers: Layers, cell: Cell, wanted: dict[int, list[str]], tokens: list[Tensor]
) -> Layers:
    assert cell.smoothing is not None
    schemes = [
        dict.fromkeys(wanted.get(number, ()), cell.scheme) for number in range(layers.num_layers)
    ]
    found = smoothings(layers, schemes, cell.smoothing, tokens)
    scales = {name: one.scale for name, one in found.items()}
    return Layers(layers.target, Weights(folded(layers, schemes, cell.smoothing, scales)))


def _solved(linear: nn.Linear, cell: Cell, seen: Tensor | None) -> QuantizedWeight | Emulated:
    if cell.lut:
        weight = linear.weight.double()
        squares = torch.ones(weight.shape[1]) if seen is None else seen.double().square().mean(0)
        bits = cell.scheme.weight.number_format.bits
        codes, tables = lut.kmeans(weight, bits, squares)
        return Emulated(lut.decoded(codes, tables), codes.numel() * bits // 8 + tables.nbytes)
    found = quantize_linear(linear, cell.scheme.fitting(linear.in_features), seen)
    return found if cell.inputs is None else replace(found, input_rule=cell.inputs)
