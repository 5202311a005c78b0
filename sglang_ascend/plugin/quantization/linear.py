"""SGLang's linear layers over whatever weights a checkpoint brings."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.linear import get_group_rank_size
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from sglang_ascend.plugin.cpu.layers import PreparedLinear
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.quantization.product import prepare
from sglang_ascend.quantization.rows import from_rows
from sglang_ascend.quantization.weight import QuantizedWeight, joined

Shard = int | str | None
_QKV = {"q": 0, "k": 1, "v": 2}

logger = logging.getLogger(__name__)


class QuantizedLinear(LinearMethodBase):
    """Collects the tensors of a layer's parts, and prepares their product when all are there."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.collected: dict[Shard, torch.Tensor] = {}
        self.product: Any = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.input_size, self.output_sizes = input_size_per_partition, output_partition_sizes
        self.dtype = params_dtype
        self._give_weight(layer, self._no_weight(None))

    def collect(self, param: torch.nn.Parameter, loaded: torch.Tensor, shard: Shard = None) -> None:
        """The ``weight_loader`` of the layer's weight; ``loaded`` is float, or rows of bytes."""
        self.collected[shard] = loaded

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not self.collected:
            if self.product is None:
                raise ValueError(f"{self.prefix} got no weight; the checkpoint lacks it.")
            return  # an update of other layers
        parts = self._parts(layer)
        self.collected = {}
        whole = joined(parts)
        if isinstance(whole, QuantizedWeight):
            needs_body = device_profile().captures_step
            self.product = prepare(whole, self.dtype, needs_body=needs_body)
            # It may have been float.
            self._give_weight(layer, self._no_weight(whole.codes.device))
            return
        if any(isinstance(part, QuantizedWeight) for part in parts):
            logger.warning(
                "%s joins float and quantized weights; it is multiplied as float.", self.prefix
            )
        self._give_weight(layer, whole.to(self.dtype))
        floats_method = PreparedLinear()
        self.product = lambda x, bias: floats_method.apply(layer, x, bias)

    def _no_weight(self, device: torch.device | None) -> torch.Tensor:
        """Of two dimensions: SGLang's models look at them."""
        return torch.empty(0, self.input_size, dtype=self.dtype, device=device)

    def _give_weight(self, layer: torch.nn.Module, weight: torch.Tensor) -> None:
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight.weight_loader = self.collect  # pyright: ignore[reportAttributeAccessIssue]

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.product(x, bias)

    def _parts(self, layer: torch.nn.Module) -> list[torch.Tensor | QuantizedWeight]:
        """This rank's part of each shard, in the order of the layer's outputs."""
        if set(self.collected) == {None} and len(self.output_sizes) > 1:
            total = self.collected.pop(None)
            share = len(total) // sum(self.output_sizes)
            sizes = [size * share for size in self.output_sizes]
            self.collected = dict(enumerate(total.split(sizes)))
        places = sorted(self.collected, key=lambda shard: _QKV.get(shard, shard or 0))  # pyright: ignore
        if len(places) != len(self.output_sizes):
            raise ValueError(f"{self.prefix} got {places} only; the checkpoint lacks a part of it.")
        group = getattr(layer, "tp_group", None)  # a replicated layer has none
        rank = (0, 1) if group is None else get_group_rank_size(group)
        device: torch.device = layer.weight.device  # pyright: ignore
        return [
            slice_of_rank(self.prefix, self.collected[shard], size, self.input_size, rank).to(
                device
            )
            for shard, size in zip(places, self.output_sizes, strict=True)
        ]


def slice_of_rank(
    name: str, tensor: torch.Tensor, num_rows: int, num_columns: int, rank: tuple[int, int]
) -> torch.Tensor | QuantizedWeight:
    """The ``num_rows`` outputs and ``num_columns`` inputs of (rank, number of ranks), of layer
    ``name``.

    Where there are fewer slices than ranks, neighbouring ranks have the same one (key heads).

    Raises:
        ValueError: so many rows and columns are no slices of this tensor.
    """
    rank_index, num_ranks = rank
    num_slices = len(tensor) // num_rows
    if len(tensor) % num_rows or not 0 < num_slices <= num_ranks:
        raise ValueError(
            f"{name} has {num_rows} outputs on each of {num_ranks} ranks, and the checkpoint "
            f"{len(tensor)} in all."
        )
    first = rank_index * num_slices // num_ranks * num_rows
    rows = tensor[first : first + num_rows]
    weight = from_rows(rows) if tensor.dtype == torch.uint8 else rows
    if weight.shape[1] == num_columns:
        return weight
    if weight.shape[1] != num_columns * num_ranks:
        raise ValueError(
            f"{name} has {num_columns} inputs on each of {num_ranks} ranks, and the checkpoint "
            f"{weight.shape[1]} in all."
        )
    start = rank_index * num_columns
    if isinstance(weight, torch.Tensor):
        return weight[:, start : start + num_columns]
    return weight.columns(start, start + num_columns)
