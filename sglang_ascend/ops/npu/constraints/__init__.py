"""The constraints of every operator that this package calls or computes, by name."""

from sglang_ascend.ops.npu.constraint import Constraints
from sglang_ascend.ops.npu.constraints import attention, cache, matmul, mla, moe, rows, sampling

CONSTRAINTS: dict[str, Constraints] = {
    constraints.name: constraints
    for module in (attention, cache, matmul, mla, moe, rows, sampling)
    for constraints in module.CONSTRAINTS
}
