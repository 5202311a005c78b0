"""Which device this process serves on; decided once, before SGLang picks a platform."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch


@lru_cache(maxsize=1)
def serves_on_npu() -> bool:
    """True beside torch_npu even when no card is visible: SGLang's own error is then the right
    one."""
    return find_spec("torch_npu") is not None


@lru_cache(maxsize=1)
def serves_on_cpu() -> bool:
    """True where SGLang would find no accelerator: the CPU then stands in for the NPU."""
    return not (serves_on_npu() or torch.cuda.is_available() or torch.xpu.is_available())


def runs_fused_step() -> bool:
    """Whether ``MTPWorker`` serves here; on CUDA SGLang's EAGLE worker runs the chain."""
    return serves_on_cpu() or serves_on_npu()


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """True where this CPU has bf16 matrix instructions.

    Elsewhere they are emulated: a 64-row product ran 7 times slower than float32 on AVX2.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
