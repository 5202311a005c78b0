"""The MTP layer's cache of a retracted request stays where it was: a part of a decode server."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def carry(original: Any, *args: Any) -> None:
    """In place of ``carry_draft_cache``."""


def install() -> None:
    target = "sglang_ascend.plugin.mtp.draft_worker.carry_draft_cache"
    HookRegistry.register(target, carry, HookType.AROUND)
