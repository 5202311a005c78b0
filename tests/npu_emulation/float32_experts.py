"""python -m npu_emulation.float32_experts ARGUMENTS...: npu_emulation.serve, experts in float32.

SGLang's runner of experts on an NPU (`AscendRunnerCore.run`) rounds their products to bfloat16 in a
float32 model too. Here a product has the type of its rows.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from npu_emulation import serve


def multiply(self: Any, *args: Any, original: Any, **kwargs: Any) -> torch.Tensor:
    """Around ``GroupedMatmul.forward``."""
    layer, prefix, rows, groups, _, *rest = args
    return original(self, layer, prefix, rows, groups, rows.dtype, *rest, **kwargs)


def keep_float32() -> None:
    from sglang.srt.hardware_backend.npu.moe.matmul import GroupedMatmul

    GroupedMatmul.forward = partialmethod(multiply, original=GroupedMatmul.forward)


def main() -> None:
    keep_float32()
    serve.main()


if __name__ == "__main__":
    main()
