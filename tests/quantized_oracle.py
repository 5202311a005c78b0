"""Whether served tokens are those of transformers' own model over quantized weights.

The weights are quantized here as tests/serving/quantized_checkpoints.py stores them, and every
product is that of the definition: the input's rows rounded to int8, an exact sum of integers, two
scales. In bfloat16 and in float32, so that greedy_oracle.py can tell a tie from a mistake: a sum of
another order turns a rounding over, and moves the logits as far apart as these two are.

Where ranks share the columns of a product, each rounds its part of a row by a scale of its own.
"""

from __future__ import annotations

import re
from copy import copy, deepcopy
from pathlib import Path

import torch
from greedy_oracle import Oracle
from serving.quantized_checkpoints import is_quantized, rounded
from torch import Tensor, nn

LAYOUT = "W8A8_DYNAMIC"


class IntegerProduct(nn.Module):
    """y = (q W^T) * scale * step with q = round(x / step), step = max|x| / 127 of each row.

    Args:
        num_parts: ranks that share the columns, each of which computes a y of its own.
    """

    def __init__(
        self, weight: Tensor, largest: int = 127, is_expert: bool = False, num_parts: int = 1
    ) -> None:
        super().__init__()
        codes, scale = rounded(weight.float().numpy(), largest)
        self.codes, self.scale = torch.from_numpy(codes), torch.from_numpy(scale)
        self.is_expert, self.num_parts = is_expert, num_parts

    def forward(self, x: Tensor) -> Tensor:
        rows, codes = (part.chunk(self.num_parts, -1) for part in (x.float(), self.codes))
        of_ranks = [self._product(*of_one) for of_one in zip(rows, codes, strict=True)]
        return torch.stack(of_ranks).to(x.dtype).sum(0)

    def _product(self, x: Tensor, codes: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        q = (x / step.where(step > 0, 1.0)).round()
        total = q.double() @ codes.double().T  # exact: below 2^53
        return total.float() * self.scale[:, 0] * step


class IntegerExperts(nn.Module):
    """In place of transformers' experts, whose weights are [experts, out, in]."""

    def __init__(self, experts: nn.Module, largest: int, num_parts: int) -> None:
        super().__init__()
        gates_up, downs = experts.gate_up_proj.data, experts.down_proj.data  # pyright: ignore
        self.gate_up = nn.ModuleList(IntegerProduct(w, largest, True) for w in gates_up)
        self.down = nn.ModuleList(IntegerProduct(w, largest, True, num_parts) for w in downs)

    def forward(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        total = torch.zeros(x.shape)
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            tokens, places = (experts == index).nonzero(as_tuple=True)
            gate, up = gate_up(x[tokens]).float().chunk(2, -1)
            product = down((nn.functional.silu(gate) * up).to(x.dtype))
            total[tokens] += product.float() * shares[tokens, places, None].float()
        return total.to(x.dtype)


class QuantizedOracle(Oracle):
    """Of a checkpoint that ``write_quantized`` made of ``folder``, with int4 experts or without.

    Args:
        halved: of modules whose columns two ranks share, what is found in their names.
    """

    def __init__(
        self, folder: Path, *, int4_experts: bool = False, halved: str | None = None
    ) -> None:
        super().__init__(folder)
        for model in self.models.values():
            _quantize(model, 7 if int4_experts else 127, halved)

    def with_scales_off_by_one_row(self) -> QuantizedOracle:
        """The mistake: experts whose outputs have each other's scales."""
        wrong = copy(self)
        wrong.models = deepcopy(self.models)
        for model in wrong.models.values():
            for product in model.modules():
                if isinstance(product, IntegerProduct) and product.is_expert:
                    product.scale = product.scale.roll(1, 0)
        return wrong


def _quantize(model: nn.Module, largest_of_experts: int, halved: str | None) -> None:
    for name, module in list(model.named_modules()):
        parent, _, place = name.rpartition(".")
        owner = model.get_submodule(parent)
        num_parts = 2 if halved is not None and re.search(halved, name) else 1
        if place == "experts":
            setattr(owner, place, IntegerExperts(module, largest_of_experts, num_parts))
        elif isinstance(module, nn.Linear) and is_quantized(f"{name}.weight", LAYOUT):
            product = IntegerProduct(module.weight.data, num_parts=num_parts)
            setattr(owner, place, product)
