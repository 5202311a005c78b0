"""What a layer's product must be: the float64 product, but for the roundings of float32."""

from __future__ import annotations

import torch


def is_product(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether float32 ``found`` is x W^T: n products and n - 1 sums round by 2^-24 each, in any
    order, so that a result errs by at most n 2^-24 sum |x w| (Higham, equation 3.5)."""
    x, weight = x.double(), weight.double()
    bound = x.shape[-1] * 2.0**-24 * (x.abs() @ weight.abs().T)
    expected = x @ weight.T
    return found.shape == expected.shape and bool(((found - expected).abs() <= bound).all())
