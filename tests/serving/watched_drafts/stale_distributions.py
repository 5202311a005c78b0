"""Rejection sampling with one mistake: a part of a server.

A draft that was not drawn is judged by what an earlier one in its place was drawn from.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def drawn_from(original: Any, relay: Any, indices: torch.Tensor, width: int) -> Any:
    """Around ``ChainRelay.drawn_from``."""
    relay.num_drawn.fill_(width)
    return original(relay, indices, width)


def install() -> None:
    target = "sglang_ascend.plugin.mtp.chain_relay.ChainRelay.drawn_from"
    HookRegistry.register(target, drawn_from, HookType.AROUND)
