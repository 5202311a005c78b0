"""Owns the Muon optimizer for stacks of weight matrices; torch's own takes single ones only."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients of Keller Jordan's Muon (kellerjordan.github.io/posts/muon).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bring the singular values of each [..., m, n] matrix near 1, by products in `dtype`.

    The iteration aims at no exact value: bfloat16 is enough for it.
    """
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.to(matrices.dtype)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for matrices or stacks of them [..., m, n]."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                average = state.setdefault("momentum", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - momentum)
                update = orthogonalise(param.grad.lerp(average, momentum), self.dtype)
                # A tall matrix gets the same change of its output's size as a square one.
                ratio = max(1.0, param.shape[-2] / param.shape[-1]) ** 0.5
                param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * ratio)


def optimizers_of(
    layer: nn.Module,
    rate: float,
    norm_rate: float,
    muon_rate: float,
    weight_decay: float,
    dtype: torch.dtype,
) -> list[torch.optim.Optimizer]:
    """AdamW for vectors, and for matrices Muon, or AdamW too at a `muon_rate` of 0; each group
    remembers its peak rate."""
    matrices = [p for p in layer.parameters() if p.dim() >= 2]
    vectors = [p for p in layer.parameters() if p.dim() < 2]
    groups = [{"params": vectors, "peak": norm_rate, "weight_decay": 0.0}]
    if not muon_rate:
        groups.append({"params": matrices, "peak": rate, "weight_decay": weight_decay})
    adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    if not muon_rate:
        return [adam]
    muon = Muon(matrices, muon_rate, momentum=0.95, weight_decay=weight_decay, dtype=dtype)
    muon.param_groups[0]["peak"] = muon_rate
    return [adam, muon]
