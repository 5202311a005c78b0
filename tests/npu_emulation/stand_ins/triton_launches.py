"""Triton kernels as work of an emulated stream, interpreted on the CPU when their turn comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from npu_emulation.device_work import is_running
from npu_emulation.stand_ins.kernels import launch

STAND_INS = (
    ("triton-ascend", "every Triton kernel", "upstream Triton's interpreter, queued on the stream"),
)


def install() -> None:
    """In a process that was started with TRITON_INTERPRET=1 (environment.py)."""
    from triton.runtime.interpreter import InterpretedFunction

    interpret = InterpretedFunction.run

    def run(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        def compute(*args: Any, **kwargs: Any) -> None:
            if function.fn.__name__ == "merge_splits":
                return merge_splits(*args, **kwargs)
            interpret(function, *args, grid=grid, warmup=warmup, **kwargs)

        if is_running():  # a stand-in that is itself computed by a Triton kernel
            compute(*args, **kwargs)
        else:
            launch(f"triton:{function.fn.__name__}", compute, *args, **kwargs)

    InterpretedFunction.run = run
    _patch_language_once()
    _multiply_bfloat16()


def merge_splits(
    split_outputs: torch.Tensor,
    masses: torch.Tensor,
    output: torch.Tensor,
    num_splits: int,
    *,
    QUERY_LEN: int,
    NUM_KV_HEADS: int,
    GROUP: int,
    WIDTH: int,
    **of_the_kernel: Any,
) -> None:
    """Attention's kernel of this name: it has a program for each row of the output and 128 columns,
    whose interpretation takes three quarters of a step's time."""
    highest = masses.amax(1, keepdim=True)
    weights = torch.exp(masses - torch.where(highest == float("-inf"), 0.0, highest))[..., None]
    outputs = torch.where(weights > 0, split_outputs, 0.0)
    merged = (outputs * weights).sum(1) / weights.sum(1).clamp(min=1)
    by_query = merged.view(-1, NUM_KV_HEADS, QUERY_LEN, GROUP, WIDTH).transpose(1, 2)
    output.copy_(by_query.reshape(output.shape))


def _patch_language_once() -> None:
    """The interpreter replaces Triton's language anew in every call of every function, which takes
    nine tenths of its time: here it stays replaced, for nothing is compiled in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


def _multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as its bits, and its product multiplies those as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype != tl.bfloat16:
            return factor
        return TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(builder, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot
