"""What torch_npu's operators compute, one definition each, independent of torch_npu."""

from npu_emulation.goldens import (
    attention,
    fusion_attention,
    kvcache,
    mla,
    moe,
    norms,
    products,
    prompts,
    quantized,
    rotary,
    sampling,
)
from npu_emulation.goldens.registry import GOLDENS, UnsupportedArgumentError, bind_golden

__all__ = [
    "GOLDENS",
    "UnsupportedArgumentError",
    "attention",
    "bind_golden",
    "fusion_attention",
    "kvcache",
    "mla",
    "moe",
    "norms",
    "products",
    "prompts",
    "quantized",
    "rotary",
    "sampling",
]
