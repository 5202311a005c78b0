"""A quantized linear in transformers' model: the product that serving runs, or would."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ascend.quantization.product import Product, prepare, rounded_inputs
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputRule, QuantizedWeight


@dataclass(frozen=True)
class Emulated:
    """A linear that is judged in memory only: no file holds it and no operator multiplies it.

    Attributes:
        values: float32 [out, in], decoded, in the rotated basis if there is one.
        num_bytes: what the weight would take.
        input_rule: what its input is rounded by, behind the rotation.
        rotation: float32 [in, in], what its input is multiplied by; or None.
    """

    values: Tensor
    num_bytes: int
    input_rule: InputRule = WEIGHT_ONLY
    rotation: Tensor | None = None

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        if self.rotation is not None:
            inputs = inputs @ self.rotation
        return F.linear(rounded_inputs(inputs, self.input_rule), self.values, bias)

    def dequantize(self) -> Tensor:
        """The values, float32 [out, in]."""
        return self.values if self.rotation is None else self.values @ self.rotation.T


class ServedLinear(nn.Module):
    """In place of `nn.Linear`.

    Raises:
        ValueError: no operator has this combination of weight and input.
    """

    def __init__(self, weight: QuantizedWeight | Emulated, bias: Tensor | None) -> None:
        super().__init__()
        is_emulated = isinstance(weight, Emulated)
        self._product: Product = weight.product if is_emulated else prepare(weight)
        self._bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self._product(inputs, self._bias)
