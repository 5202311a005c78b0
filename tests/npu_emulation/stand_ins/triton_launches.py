"""Triton kernels as work of an emulated stream, interpreted on the CPU when their turn comes."""

from __future__ import annotations

from typing import Any

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
            interpret(function, *args, grid=grid, warmup=warmup, **kwargs)

        if is_running():  # a stand-in that is itself computed by a Triton kernel
            compute(*args, **kwargs)
        else:
            launch(f"triton:{function.fn.__name__}", compute, *args, **kwargs)

    InterpretedFunction.run = run
