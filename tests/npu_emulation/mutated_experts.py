"""python -m npu_emulation.mutated_experts MISTAKE ARGUMENTS...: as npu_emulation.serve, with a
mistake in how MTP's step exchanges rows between the ranks of its experts."""

from __future__ import annotations

import sys

import torch
from sglang.srt.layers.dp_attention import set_is_extend_in_batch
from sglang.srt.model_executor.runner_utils.deepep_adapter import DeepEPCudaGraphRunnerAdapter

from npu_emulation import serve
from npu_emulation.goldens.quantized import dynamic_quant
from npu_emulation.stand_ins import expert_exchange
from sglang_ascend.plugin.mtp import forwards


def forgotten_mode() -> None:
    """Graphs are replayed on the buffers that a prefill has left."""
    DeepEPCudaGraphRunnerAdapter.replay = lambda adapter: None


def captured_prefill_mode() -> None:
    """The step exchanges rows as a prefill does."""
    forwards.set_is_extend_in_batch = lambda is_extend: set_is_extend_in_batch(True)


def forgotten_scales() -> None:
    """Rows of int8 arrive without their scales."""

    def codes_alone(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = dynamic_quant(x)
        return codes, torch.ones_like(scales)

    expert_exchange.dynamic_quant = codes_alone


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (forgotten_mode, captured_prefill_mode, forgotten_scales)
}

if __name__ == "__main__":
    MISTAKES[sys.argv.pop(1)]()
    serve.main()
