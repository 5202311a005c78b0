"""What torch_npu's operators ask of a call, and a mode that checks each call against it."""

from sglang_ascend.ops.npu.calls import CallRefused, CheckedCalls, refusal
from sglang_ascend.ops.npu.constraints import CONSTRAINTS
from sglang_ascend.ops.npu.installed import difference, documentation

__all__ = [
    "CONSTRAINTS",
    "CallRefused",
    "CheckedCalls",
    "difference",
    "documentation",
    "refusal",
]
