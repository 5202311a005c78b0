"""The demands of every operator that this package calls or computes, by name."""

from sglang_ascend.ops.npu.demand import Demand
from sglang_ascend.ops.npu.demands import attention, cache, matmul, mla, moe, rows, sampling

DEMANDS: dict[str, Demand] = {
    demand.name: demand
    for module in (attention, cache, matmul, mla, moe, rows, sampling)
    for demand in module.DEMANDS
}
