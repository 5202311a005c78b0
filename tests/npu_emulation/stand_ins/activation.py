"""The activation of experts that rows travel to."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulation.goldens.quantized import dynamic_quant
from npu_emulation.stand_ins.kernels import kernel, launch, new_result

STAND_INS = (
    (
        "`sgl_kernel_npu.activation.swiglu_quant.swiglu_quant`",
        "`srt/hardware_backend/npu/moe/activation.py`",
        "SwiGLU of the rows that have an expert",
    ),
)


@kernel("activation.swiglu_quant.swiglu_quant")
def swiglu_quant(
    x: Tensor, group_list: Tensor, group_list_type: int, need_quant: bool = True
) -> tuple[Tensor, Tensor]:
    """(SwiGLU of x [rows, 2 * width], a scale for each row of int8). Rows behind the groups' are
    not written."""
    if group_list_type != 1:
        raise NotImplementedError("swiglu_quant's stand-in takes counts.")
    dtype = torch.int8 if need_quant else x.dtype
    result = new_result(x, len(x), x.shape[1] // 2, dtype=dtype)
    scales = new_result(x, len(x), dtype=torch.float32)

    def compute(x: Tensor, group_list: Tensor, result: Tensor, scales: Tensor) -> None:
        num_rows = int(group_list.sum())
        gate, up = x[:num_rows].float().chunk(2, -1)
        activated = torch.nn.functional.silu(gate) * up
        if need_quant:
            activated, scales[:num_rows] = dynamic_quant(activated)
        result[:num_rows] = activated

    launch("swiglu_quant", compute, x, group_list, result, scales)
    return result, scales
