"""Each wait for the NPU as a line in a server's log: what `sglang-ascend verify-npu` counts."""

from __future__ import annotations

from importlib.util import find_spec

from sglang_ascend.env import LOG_WAITS


def log_waits() -> None:
    """In the process that calls it, where the variable asks for it and torch_npu is installed."""
    if not LOG_WAITS.get() or find_spec("torch_npu") is None:
        return
    import torch

    torch.get_device_module("npu").set_sync_debug_mode("warn")
