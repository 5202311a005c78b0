"""Triton kernels as work of an emulated stream, interpreted on the CPU when their turn comes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from npu_emulation.device_work import is_running
from npu_emulation.stand_ins.kernels import launch
from sglang_ascend.ops.attention.reference import paged_mla

STAND_INS = (
    ("triton-ascend", "every Triton kernel", "upstream Triton's interpreter, queued on the stream"),
)


def install() -> None:
    """In a process that was started with TRITON_INTERPRET=1 (environment.py)."""
    from triton.runtime.interpreter import InterpretedFunction

    interpret = InterpretedFunction.run

    def run(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        def compute(*args: Any, **kwargs: Any) -> None:
            whole = computed_whole().get(function.fn.__name__)
            if whole is not None:
                return whole(*args, **kwargs)
            interpret(function, *args, grid=grid, warmup=warmup, **kwargs)

        if is_running():  # a stand-in that is itself computed by a Triton kernel
            compute(*args, **kwargs)
        else:
            launch(f"triton:{function.fn.__name__}", compute, *args, **kwargs)

    InterpretedFunction.run = run
    _patch_language_once()
    _multiply_bfloat16()


def computed_whole() -> dict[str, Any]:
    """Kernels whose interpretation, program by program, takes nearly all of a step's time."""
    if os.environ.get("NPU_EMULATION_INTERPRET_MLA"):
        return {"merge_splits": merge_splits}
    return {"merge_splits": merge_splits, "mla_in_parts": mla_in_parts}


def mla_in_parts(
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    output: torch.Tensor,
    masses: torch.Tensor,
    scale: float,
    *strides: int,
    QUERY_LEN: int,
    RANK: int,
    PAGE_SIZE: int,
    **of_the_kernel: Any,
) -> None:
    """Attention's kernel of this name, by the operator's definition: the first split has all."""
    num_visible = (kv_lens[:, None] - QUERY_LEN + 1 + torch.arange(QUERY_LEN)).flatten()
    num_rows = len(num_visible)  # a mistaken caller has others, which no program reads or writes
    attended = paged_mla(
        query[:num_rows],
        latent_cache[..., :RANK],
        block_table,
        kv_lens,
        query_len=QUERY_LEN,
        page_size=PAGE_SIZE,
        scale=scale,
        kv_lora_rank=RANK,
        rope_cache=rope_cache,
        query_rope=query_rope[:num_rows],
    )
    sees = num_visible > 0  # not the padding of a graph
    attended[~sees] = 0
    of_rows = slice(num_rows * attended.shape[1])
    output.view(*masses.shape, RANK)[of_rows, 0] = attended.flatten(0, 1)
    masses[of_rows] = float("-inf")
    masses[of_rows, 0] = torch.where(sees, 0.0, float("-inf")).repeat_interleave(attended.shape[1])


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
    """Attention's kernel of this name, which has a program for each row of the output and 128
    columns."""
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
