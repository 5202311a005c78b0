"""What torch_npu's operators demand of a call, and a mode that checks each call against it."""

from sglang_ascend.ops.npu.calls import CallRefused, CheckedCalls, refusal
from sglang_ascend.ops.npu.demands import DEMANDS
from sglang_ascend.ops.npu.installed import difference, documentation

__all__ = [
    "DEMANDS",
    "CallRefused",
    "CheckedCalls",
    "difference",
    "documentation",
    "refusal",
]
