"""What differs between the devices that this process may serve on; chosen once, before SGLang picks
a platform. Code above asks for what it needs to know, never for a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class DeviceProfile:
    """One device, by what a server on it does."""

    # Of the operators' bodies.
    device_type: str
    # For `sglang-ascend doctor`: why this device serves.
    reason: str
    # The platform and the attention are this package's, and stand in for Ascend's.
    emulates: bool
    # ``MTPWorker`` runs the step; elsewhere SGLang's EAGLE worker runs the chain.
    runs_step: bool
    # The step is captured in graphs when the server starts.
    captures_step: bool
    # The host launches work and goes on: what it takes the device's own events say.
    launches_ahead: bool
    # SGLang's Ascend path (pools, prefill, scheduling) serves beside the step.
    keeps_ascend_path: bool
    # SGLang's own methods multiply quantized weights: ``--quantization`` asks for them.
    has_core_quantization: bool
    # A row without a seed is drawn by SGLang's own sampler, which must not stop the host.
    draws_as_core: bool


CPU = DeviceProfile(
    device_type="cpu",
    reason="no accelerator and no torch_npu, so the CPU stands in for the NPU",
    emulates=True,
    runs_step=True,
    captures_step=False,
    launches_ahead=False,
    keeps_ascend_path=False,
    has_core_quantization=False,
    draws_as_core=True,
)
NPU = DeviceProfile(
    device_type="npu",
    reason="torch_npu is installed, so SGLang's own Ascend platform serves",
    emulates=False,
    runs_step=True,
    captures_step=True,
    launches_ahead=True,
    keeps_ascend_path=True,
    has_core_quantization=True,
    draws_as_core=False,
)
CUDA = DeviceProfile(
    device_type="cuda",
    reason="torch sees an accelerator, so SGLang's own platform serves",
    emulates=False,
    runs_step=False,
    captures_step=False,
    launches_ahead=True,
    keeps_ascend_path=False,
    has_core_quantization=True,
    draws_as_core=True,
)


@lru_cache(maxsize=1)
def device_profile() -> DeviceProfile:
    """The NPU's beside torch_npu even when no card is visible: SGLang's own error is then the right
    one. The CPU's where SGLang would find no accelerator."""
    if find_spec("torch_npu") is not None:
        return NPU
    return CUDA if torch.cuda.is_available() or torch.xpu.is_available() else CPU
