"""What triton-ascend's front end and adapter make of a kernel computes what the kernel is for.

The linalg of each target runs on the CPU against an oracle in loops or float64; with one operation
changed it must not pass. What comes after linalg, and effects of parallelism, are not tested.
"""

from functools import partial

import attention_launches
import chain_launches
import pytest
import sampling_launches
from kernel_list import listed_kernels
from launches import is_right, stays_inside
from linalg_on_cpu import Executable
from lowering import to_linalg
from sampling_launches import CAPACITY, GROUP, refine, refine_candidates, stream, weigh
from targets import TARGETS, Target

from sglang_ascend.ops.sampling import triton

LISTED = {kernel.name: kernel for kernel in listed_kernels()}
LAUNCHES = {**chain_launches.LAUNCHES, **attention_launches.LAUNCHES, **sampling_launches.LAUNCHES}

# Vocabularies shorter than a tile of 64 groups. An NPU's rows are whole groups, as the candidates
# are; the stages that need not that end inside of one too.
SHORT = [("refine fp32", refine_candidates, groups * GROUP) for groups in (1, 17, 63)]
SHORT += [("stream fp32", stream, size) for size in (100, 4032)]
SHORT += [("weigh fp32", weigh, size) for size in (100, 4032)]


def named(value: object) -> str:
    return getattr(value, "__name__", str(value))


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


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("name", "function", "vocab_size"), SHORT, ids=named)
def test_the_filters_keep_to_a_row_shorter_than_a_tile(name, function, vocab_size, target: Target):
    linalg, launch = linalg_of(name, target), partial(function, vocab_size)
    assert launch().deviations(Executable(linalg)) == {}
    assert stays_inside(launch, linalg)


def test_the_filters_are_listed_as_the_package_launches_them():
    constants = triton.sizes() | {"CAPACITY": triton.CAPACITY}
    assert LISTED["refine fp32"].constants == constants | {"JOINT": True}
    assert (constants["GROUP"], constants["CAPACITY"]) == (GROUP, CAPACITY)


@pytest.mark.parametrize(
    ("operation", "changed"),
    [("arith.cmpf ogt", "arith.cmpf olt"), ("arith.subf", "arith.addf")],
)
def test_one_changed_operation_is_noticed_among_candidates(operation: str, changed: str):
    linalg = linalg_of("refine fp32", TARGETS[0])
    assert operation in linalg
    launch = partial(refine_candidates, 17 * GROUP)
    assert not is_right(launch, linalg.replace(operation, changed, 1))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_control_a_bisected_row_shorter_than_a_tile_is_left(target: Target):
    """A mask of values keeps no read inside, so that the package bisects no row so short."""
    linalg = linalg_of("refine fp32", target)
    assert not stays_inside(partial(refine, 63 * GROUP), linalg)
    assert stays_inside(partial(refine, 64 * GROUP), linalg)
