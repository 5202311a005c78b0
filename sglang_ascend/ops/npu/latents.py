"""What torch_npu's operators take of a model with latent attention, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Columns of a latent and of the rotated part beside it: of fused attention, of the fused norm and
# cache, and 64 of the rotation (`npu_interleave_rope`).
DOCUMENTED = (512, 64)


def untaken_latents(config: Mapping[str, Any]) -> str:
    """Why an NPU may refuse the latents of this model; empty where nothing is known against it."""
    found = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if found[0] is None or found == DOCUMENTED:
        return ""
    has, takes = ("{} + {}".format(*columns) for columns in (found, DOCUMENTED))
    return (
        f"the model's latents have {has} columns, and by their documentation "
        f"torch_npu's operators, which SGLang calls, take {takes}"
    )
