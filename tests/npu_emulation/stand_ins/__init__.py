"""What SGLang's NPU path needs and no package registry has, in a process on the emulated NPU.

`install()` comes before `import sglang`. `STAND_INS` says what stands in for what. Every other
kernel of `sgl_kernel_npu` can be imported and raises by its name when it is called.
"""

from __future__ import annotations

from npu_emulation.stand_ins import (
    activation,
    allocation,
    expert_exchange,
    grammar,
    modules,
    norms,
    speculation,
    trace_rules,
    transfers,
    triton_launches,
)
from npu_emulation.stand_ins.kernels import launched

# (what is missing, who wants it, what is in its place)
STAND_INS = (
    *modules.STAND_INS,
    *trace_rules.STAND_INS,
    *triton_launches.STAND_INS,
    *allocation.STAND_INS,
    *norms.STAND_INS,
    *speculation.STAND_INS,
    *grammar.STAND_INS,
    *transfers.STAND_INS,
    *expert_exchange.STAND_INS,
    *activation.STAND_INS,
)

__all__ = ["STAND_INS", "install", "launched"]


def install() -> None:
    modules.install(expert_exchange.MODULES)
    trace_rules.install()
    transfers.install()
    triton_launches.install()
