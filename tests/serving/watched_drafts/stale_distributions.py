"""Rejection sampling with one mistake: a part of a server.

A draft that was not drawn is judged by what an earlier one in its place was drawn from.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def of(original: Any, drawn: Any, rows: torch.Tensor, width: int) -> Any:
    """Around ``DrawnDrafts.of``."""
    drawn.num_drawn.fill_(width)
    return original(drawn, rows, width)


def install() -> None:
    target = "sglang_ascend.speculative.drawn.DrawnDrafts.of"
    HookRegistry.register(target, of, HookType.AROUND)
