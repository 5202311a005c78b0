"""Linears that no file holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Emulated:
    """A linear that is judged in memory only: no operator multiplies it as it is quantized.

    Attributes:
        values: float32 [out, in], decoded.
        num_bytes: what the weight would take.
    """

    values: Tensor
    num_bytes: int

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(inputs, self.values, bias)

    def dequantize(self) -> Tensor:
        """The values, float32 [out, in]."""
        return self.values
