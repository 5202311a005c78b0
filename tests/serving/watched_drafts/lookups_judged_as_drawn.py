"""Rejection sampling with one mistake: a part of a server.

A lookup is judged by what the MTP layer's draft in its place was drawn from.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def draft(original: Any, phases: Any, *args: Any) -> Any:
    """Around ``LookupPhases.draft``."""
    phases.drawn_from = ()
    return original(phases, *args)


def install() -> None:
    target = "sglang_ascend.speculative.lookup.phases.LookupPhases.draft"
    HookRegistry.register(target, draft, HookType.AROUND)
