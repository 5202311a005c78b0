"""What a conversion asks of the layout that it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from sglang_ascend.quantization.layouts import Layout
from sglang_ascend.quantization.weight import QuantizedWeight


class Writer:
    """Turns weights into a layout's tensors and remembers what its side files have to say.

    Attributes:
        shard_name: of shard {} of {}.
        single_name: of the only shard, if it has another name and then no index.
        metadata: of the safetensors header.
    """

    name: ClassVar[str]
    shard_name: ClassVar[str] = "model-{:05d}-of-{:05d}.safetensors"
    index_name: ClassVar[str] = "model.safetensors.index.json"
    single_name: ClassVar[str | None] = "model.safetensors"
    metadata: ClassVar[dict[str, str] | None] = {"format": "pt"}

    def keeps_own(self, source: Layout) -> bool:
        """Whether this layout has a place for what only `source` knows (`Layout.is_own`)."""
        return False

    def write_float(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of no quantized module."""
        return tensor

    def write(self, module: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of `module`, by suffix.

        Raises:
            CheckpointError: the layout cannot hold such a weight.
        """
        raise NotImplementedError

    def config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """config.json, from the fields of that of the source without its quantization; called when
        every tensor is written."""
        return dict(fields)

    def files(self) -> dict[str, Mapping[str, Any]]:
        """Side files by name; called when every tensor is written."""
        return {}

    def order(self, names: Iterable[str]) -> list[str]:
        """Names of tensors in the order of the index."""
        return sorted(names)
