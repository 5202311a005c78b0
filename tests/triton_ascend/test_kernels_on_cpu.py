"""What triton-ascend's front end and adapter make of a kernel computes what the kernel is for.

The linalg of each target runs on the CPU against an oracle in loops or float64; with one operation
changed it must not pass. What comes after linalg, and effects of parallelism, are not tested.
"""

import attention_launches
import chain_launches
import pytest
import sampling_launches
from kernel_list import listed_kernels
from launches import is_right, stays_inside
from linalg_on_cpu import Executable
from lowering import to_linalg
from targets import TARGETS, Target

LISTED = {kernel.name: kernel for kernel in listed_kernels()}
LAUNCHES = {**chain_launches.LAUNCHES, **attention_launches.LAUNCHES, **sampling_launches.LAUNCHES}


def linalg_of(name: str, target: Target) -> str:
    return to_linalg(LISTED[name], target)[1]


def test_every_listed_kernel_is_executed_or_says_why_not():
    assert LAUNCHES.keys() <= LISTED.keys()
    executed = {LISTED[name].function for name in LAUNCHES}
    for kernel in LISTED.values():
        assert (kernel.function in executed) != bool(kernel.not_executed), kernel


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_computes_what_its_oracle_does_and_writes_nothing_else(name: str, target: Target):
    assert LAUNCHES[name]().deviations(Executable(linalg_of(name, target))) == {}


@pytest.mark.parametrize("name", LAUNCHES)
def test_one_changed_operation_is_noticed(name: str):
    linalg, changes = linalg_of(name, TARGETS[0]), LAUNCHES[name]().changes
    assert changes
    assert is_right(LAUNCHES[name], linalg)
    for operation, changed in changes:
        assert operation in linalg, f"{operation} is not in the linalg any more"
        assert not is_right(LAUNCHES[name], linalg.replace(operation, changed, 1)), operation


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_touches_nothing_outside_of_its_tensors(name: str, target: Target):
    assert stays_inside(LAUNCHES[name], linalg_of(name, target))
