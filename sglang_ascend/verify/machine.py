"""What the verification runs on: device, CANN, driver and versions, as they name themselves."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec

from sglang_ascend.bench.figures.machine import cpu_name
from sglang_ascend.stack import cann_version, installed_version

PACKAGES = ("torch", "torch_npu", "triton-ascend", "sglang", "sgl-kernel-npu", "sglang-ascend")
NPU_SMI_TIMEOUT_S = 30
# Set by scripts/npu_emulation.sh, which no NPU is needed for.
EMULATION = "NPU_EMULATION"
REHEARSAL = "rehearsal on CPU, not an NPU result"
EMULATED = "host path on an emulated NPU, not an NPU result"


class NoNpuError(RuntimeError):
    """There is nothing to verify here; the message is one sentence that says why."""


@dataclass(frozen=True)
class Machine:
    """``label`` heads every report; ``facts`` are shown as they are."""

    device: str  # "npu" or "cpu"
    label: str
    facts: dict[str, str]

    @property
    def is_emulated(self) -> bool:
        return self.label == EMULATED


def describe(device: str) -> Machine:
    """Raises NoNpuError where ``device`` is "npu" and torch_npu sees none."""
    versions = {name: installed_version(name) or "not installed" for name in PACKAGES}
    facts = {"python": platform.python_version(), "machine": platform.machine(), **versions}
    if device == "cpu":
        return Machine(device, REHEARSAL, {"device": cpu_name(), **facts})
    name, count = npu_name()
    cann = {"CANN": cann_version() or "unknown", "npu-smi": npu_smi()}
    label = EMULATED if EMULATION in os.environ else f"measured on {name}"
    return Machine(device, label, {"device": name, "devices": str(count), **cann, **facts})


def npu_name() -> tuple[str, int]:
    """(name of device 0, number of devices)"""
    nothing = "so nothing was verified"
    if find_spec("torch_npu") is None:
        raise NoNpuError(f"no NPU here: torch_npu is not installed, {nothing}.")
    try:
        import torch

        npu = torch.get_device_module("npu")
        count = npu.device_count()
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise NoNpuError(
            f"no NPU here: torch_npu could not be loaded ({reason}), {nothing}."
        ) from error
    if not count:
        raise NoNpuError(
            f"no NPU here: torch_npu sees no device, {nothing}; see `npu-smi info` and "
            "ASCEND_RT_VISIBLE_DEVICES."
        )
    return npu.get_device_name(0), count


def npu_smi() -> str:
    """The first line of `npu-smi info` that names versions, as the driver prints it."""
    program = shutil.which("npu-smi")
    if program is None:
        return "not found"
    try:
        shown = subprocess.run(
            [program, "info"], capture_output=True, text=True, timeout=NPU_SMI_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    lines = [line.strip("| ") for line in shown.splitlines() if "ersion" in line]
    return lines[0] if lines else "printed no version"
