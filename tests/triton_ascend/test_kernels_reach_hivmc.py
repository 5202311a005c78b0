"""Every Triton kernel passes all of triton-ascend and bishengir but the closed `hivmc`, in budget.

What this shows and what not: docs/triton-ascend.md. No NPU code is made.
"""

import pytest
from hivm_report import report_of, takes_lock
from kernel_list import Kernel, listed_kernels
from lowering import lower
from targets import TARGETS, Target

LAUNCHED = [
    pytest.param(kernel, target, id=f"{kernel}-{target}")
    for kernel in listed_kernels()
    for target in TARGETS
    if not kernel.only or target.name in kernel.only
]


@pytest.mark.parametrize(("kernel", "target"), LAUNCHED)
def test_a_kernel_reaches_the_code_generator_within_its_budget(
    kernel: Kernel, target: Target, tmp_path, record_property
):
    lowered = lower(kernel, target, tmp_path)
    report = report_of(lowered.hivm)
    loops = len(report.scalar_loops), len(report.row_loops)
    record_property(str(kernel), f"{target!s:14} {report}")
    budget = kernel.scalar_loops.get(target.name, 0), kernel.row_loops.get(target.name, 0)
    described = [f"line {loop.line} of @{loop.function}" for loop in report.scalar_loops]
    assert loops == budget, f"scalar loops at {described}; the last HIVM is {tmp_path}"
    assert not takes_lock(lowered.hivm)
    assert lowered.retried == (), "it fits only with less buffering"
