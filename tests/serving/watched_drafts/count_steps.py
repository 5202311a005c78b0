"""The steps that a server runs are counted in the file $STEPS, a line each: a part of a server."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def step(original: Any, *args: Any) -> Any:
    """Around ``speculative_step``."""
    with open(os.environ["STEPS"], "a") as file:
        file.write("step\n")
    return original(*args)


def install() -> None:
    HookRegistry.register("sglang_ascend.plugin.mtp.worker.speculative_step", step, HookType.AROUND)
