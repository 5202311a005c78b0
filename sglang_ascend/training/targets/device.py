"""Where a training computes; what it reads and writes lies on the CPU."""

from __future__ import annotations

import os

import torch

AUTO = "auto"
ACCELERATORS = ("cuda", "npu")
DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")


def accelerator() -> torch.device | None:
    """This machine's, if it is one of `ACCELERATORS`. An NPU is one of torch's accelerators once
    torch has loaded its backend, as it does by itself."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return here if here is not None and here.type in ACCELERATORS else None


def compute_device(name: str = AUTO) -> torch.device:
    """The device `name`; for "auto" this machine's accelerator, or the CPU where it has none.

    Of several processes that torchrun started each has the accelerator of its local rank.

    Raises:
        ValueError: `name` is no device, or this machine has none.
    """
    here = accelerator()
    if name == AUTO:
        name = (here or CPU).type
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"--device {name!r} is none that this PyTorch knows: pass auto, cpu, cuda, or npu "
            "where torch_npu is installed."
        ) from None
    if device.type == CPU.type:
        return CPU
    if here is None or device.type != here.type:
        raise ValueError(
            f"--device {name} is not on this machine, as PyTorch {torch.__version__} sees it: pass "
            "--device cpu, or install a PyTorch for it."
        )
    # On Hopper PyTorch prefers cuDNN, which plans an attention anew for every shape, in some 30 ms;
    # batches of conversations have hundreds of shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device(device.type, rank) if device.index is None else device


def dtype_of_products(asked: str | None, device: torch.device) -> str:
    """`asked`, or bfloat16 where the device has units for it.

    Raises:
        ValueError: another is asked for.
    """
    if asked not in (None, *DTYPES):
        raise ValueError(f"--dtype {asked!r} is none of {', '.join(DTYPES)}.")
    return asked or ("float32" if device.type == CPU.type else "bfloat16")
