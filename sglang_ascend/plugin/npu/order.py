"""Orders that SGLang takes for granted and a card does not promise; each holds unless switched off.

vllm-ascend's pull request 14922 found kernels on a 910B3 that ran before a copy from pinned memory
that was queued ahead of them.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from sglang_ascend.env import TRUST_COPY_ORDER

# SGLang's switch, on by default on CUDA only: what the scheduler writes next waits, on the device,
# for the last forward's reads.
WRITE_AFTER_READ = "SGLANG_ENABLE_WAR_BARRIER"


def enable_write_after_read_barrier() -> None:
    """In the processes that this one starts, unless the variable is set."""
    os.environ.setdefault(WRITE_AFTER_READ, "1")


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def to_device(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Pinned ``host`` on ``device``, where later kernels find it.

    The copy has a stream of its own, so that the host waits for it and not for the step that runs.
    """
    device = torch.device(device)
    if device.type == "cpu" or TRUST_COPY_ORDER.get():
        return host.to(device, non_blocking=True)
    module = torch.get_device_module(device)
    user = module.current_stream(device)
    with module.stream(_copy_stream(device)):
        copied = host.to(device, non_blocking=True)
        landed = module.Event()
        landed.record()
    landed.synchronize()
    copied.record_stream(user)  # its memory is not the copies' own again before that stream read it
    return copied
