"""What torch_npu's operators compute, one definition each, independent of torch_npu."""

from npu_emulation.goldens import norms, quantized
from npu_emulation.goldens.registry import GOLDENS, UnsupportedArgumentError, bind_golden

__all__ = ["GOLDENS", "UnsupportedArgumentError", "bind_golden", "norms", "quantized"]
