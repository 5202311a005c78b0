"""A quantized linear in transformers' model: the product that serving runs."""

from __future__ import annotations

from torch import Tensor, nn

from sglang_ascend.quantization.product import prepare
from sglang_ascend.quantization.weight import QuantizedWeight


class ServedLinear(nn.Module):
    """In place of `nn.Linear`.

    Raises:
        ValueError: no operator has this combination of weight and input.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self._product, self._bias = prepare(weight), bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self._product(inputs, self._bias)
