"""Kernels that are launched without torch_npu: recorded by name, queued on the current stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from npu_emulation.device_work import alias, enqueue, is_capturing, poison
from npu_emulation.goldens.registry import golden

launched: list[str] = []  # every such launch of this process, in order; those in a capture once

KERNELS: dict[str, Kernel] = {}  # of sgl_kernel_npu, by name below the package


class Kernel:
    """As a Triton kernel it may be given a grid, which says nothing about what it computes."""

    def __init__(self, host_function: Callable[..., Any]) -> None:
        self.host_function = host_function

    def __getitem__(self, grid: Any) -> Kernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.host_function(*args, **kwargs)


def kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as `sgl_kernel_npu`'s kernel `name`; it calls `launch` once."""

    def register(host_function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS[name] = Kernel(host_function)
        return host_function

    return register


def launch(name: str, compute: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Queue `compute`, which is given CPU tensors over the memory of the device's."""
    launched.append(name)
    cpu_args, cpu_kwargs = tree_map(alias, (args, kwargs))
    enqueue(partial(compute, *cpu_args, **cpu_kwargs))


def new_result(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for a kernel's result, poison until it runs."""
    result = torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
    if not is_capturing():
        poison(result)
    return result


_operators = torch.library.Library("npu", "FRAGMENT")


def custom_operator(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Define `torch.ops.npu.<schema>`; its launch is recorded, its definition a golden."""
    name = schema.partition("(")[0]

    def register(definition: Callable[..., None]) -> Callable[..., None]:
        _operators.define(schema)
        _operators.impl(name, lambda *args: launched.append(f"npu::{name}"), "PrivateUse1")
        golden(f"npu::{name}")(definition)
        operator = getattr(torch.ops.npu, name).default
        wanted = [argument.name for argument in operator._schema.arguments]
        assert list(inspect.signature(definition).parameters) == wanted, name
        return definition

    return register
