"""What a rank holds of a model's weights once a server has loaded them on an NPU.

Quantized ones are cut, joined and prepared as this package's methods of SGLang's layers do it, on
the meta device, where weights have shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

from sglang_ascend.memory.weights import Layer, Matrix, Share, Weights
from sglang_ascend.quantization.product import Held, held, held_grouped, is_decoded
from sglang_ascend.quantization.weight import QuantizedWeight, joined

DTYPE = torch.bfloat16

# By share, how many slices there are and which one it is.
Slices = tuple[tuple[Share, tuple[int, int]], ...]


@dataclass(frozen=True)
class RankWeights:
    """On one rank.

    Attributes:
        num_bytes: of all weights.
        decoded: by scheme, the linears of which the values are held.
    """

    num_bytes: int
    decoded: Mapping[str, list[str]]


def rank_weights(weights: Weights, divisors: Mapping[Share, int], rank: int) -> RankWeights:
    """
    Raises:
        ValueError: a layer that stops the start of a server.
    """
    total = sum(ceil(size / divisors[share]) * n for (size, share), n in weights.floats.items())
    decoded: dict[str, set[str]] = {}
    layers = weights.layers.copy()
    if weights.draft_head and divisors[Share.RANKS] == 1:  # a split head is drafted by whole
        layers[weights.draft_head] += 1
    for layer, count in layers.items():
        own = rank if layer.is_cut_by_columns else 0  # slices of rows are alike
        slices = tuple((share, (number, own % number)) for share, number in divisors.items())
        kept = _held(layer, weights.layout, slices)
        total += kept.num_bytes * count
        if kept.is_float:
            place = "experts." if layer.has_experts else ""
            for name, scheme in layer.quantized:
                decoded.setdefault(scheme.name, set()).add(place + name)
    return RankWeights(total, {scheme: sorted(names) for scheme, names in sorted(decoded.items())})


@lru_cache(maxsize=4096)
def _held(layer: Layer, layout: str, slices: Slices) -> Held:
    whole = {
        parts: joined([_cut(part, layout, *dict(slices)[part.share]) for part in parts])
        for parts in set(layer.matrices)
    }
    if layer.has_experts:
        return held_grouped([whole[parts] for parts in layer.matrices], DTYPE, needs_body=True)
    (weight,) = whole.values()
    if isinstance(weight, Tensor):
        return Held.of(weight.to(DTYPE))
    return held(weight, DTYPE, needs_body=True)


def _cut(part: Matrix, layout: str, number: int, place: int) -> Tensor | QuantizedWeight:
    """The slice `place` of `number`."""
    if part.scheme is None:
        weight = torch.empty(part.rows, part.columns, dtype=DTYPE, device="meta")
    else:
        weight = part.scheme.without_values(part.rows, part.columns, layout)
        if is_decoded(part.name):
            weight = weight.dequantize()
    size = ceil((part.columns if part.is_cut_by_columns else part.rows) / number)
    start = min(place * size, part.columns - size) if part.is_cut_by_columns else 0
    if isinstance(weight, Tensor):
        return weight[:, start : start + size] if part.is_cut_by_columns else weight[:size]
    weight = weight.refined((1, weight.block[1]))
    return weight.columns(start, start + size) if part.is_cut_by_columns else weight.rows(0, size)
