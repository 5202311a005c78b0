"""Other processors than this one, that a process of its own can be made to compile for."""

from __future__ import annotations

import llvmlite.binding

# Numba's: 256-bit vectors, and neither integer nor bfloat16 products.
HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+avx,+sse4.2"}


def without(*absent: str) -> dict[str, str]:
    """This processor without some of LLVM's features."""
    features = dict(llvmlite.binding.get_host_cpu_features())
    present = {name for name, has in features.items() if has} - {*absent}
    flags = [f"{'+' if name in present else '-'}{name}" for name in features]
    return {
        "NUMBA_CPU_NAME": llvmlite.binding.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": ",".join(flags),
    }
