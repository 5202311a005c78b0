"""The form of a call that verify-npu makes of an operator, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, HIDDEN = 32, 1024

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OperatorCall:
    """``build`` draws from torch's generator; the same seed makes the same call."""

    build: Callable[[torch.dtype], Arguments]
    dtypes: tuple[torch.dtype, ...] = (BF16, FP32)
    # Roundings to the output's type that body and reference may be apart.
    roundings: int = 1
    # Called when weights are loaded, when a wait costs nobody anything.
    at_load: bool = False
    # (result, arguments) -> the tensors in which body and reference must agree.
    compared: Callable[[Any, tuple[Any, ...]], Any] = lambda result, args: (result, args)
    # What the body must compute, where it is not the operator's reference.
    oracle: Callable[..., Any] | None = None


def arguments_of(call: OperatorCall, dtype: torch.dtype, seed: int = 0) -> Arguments:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return call.build(dtype)
