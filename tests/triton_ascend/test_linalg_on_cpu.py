"""The execution of linalg on the CPU is right where the kernel is, and says so where it is not.

Control kernels: floating point against float64, and memory beside which none may be touched.
"""

from functools import partial

import pytest
import torch
from control_launches import gather_if_inside, store_positive
from kernel_list import Kernel
from launches import Launch, stays_inside
from linalg_on_cpu import Executable
from lowering import to_linalg
from targets import TARGETS, Target


def linalg_of(function: str, target: Target, arguments: dict[str, str], **constants: int) -> str:
    return to_linalg(Kernel(function, "control_kernels", function, arguments, constants), target)[1]


def softmax_linalg(target: Target) -> str:
    arguments = {"x": "*fp32", "output": "*fp32", "stride": "i32", "size": "i32"}
    return linalg_of("softmax", target, arguments, BLOCK=1024)


def softmax() -> Launch:
    """5 rows of 777. The largest weight is below 2^-3, of which an ulp is 2^-27."""
    x = torch.randn(5, 777, generator=torch.Generator().manual_seed(2))
    expected = {1: torch.softmax(x.double(), -1)}
    return Launch((5,), (x, torch.zeros_like(x), 777, 777), expected, (), tolerance=4 * 2**-27)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_softmax_agrees_with_float64(target: Target):
    assert softmax().deviations(Executable(softmax_linalg(target))) == {}


def test_weights_multiplied_by_their_sum_do_not():
    linalg = softmax_linalg(TARGETS[0])
    changed = linalg.replace("arith.divf", "arith.mulf", 1)
    assert changed != linalg
    assert softmax().deviations(Executable(changed)).keys() == {1}


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16"])
def test_a_product_of_matrices_agrees_with_float64(target: Target, element: str):
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[element]
    pointers = {"x": f"*{element}", "y": f"*{element}", "output": "*fp32"}
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    # Factors are exact in fp32; 32 products are added with one rounding of 2^-24 each.
    magnitude = (x.double().abs() @ y.double().abs().T).max().item()
    expected = {2: x.double() @ y.double().T}
    launch = Launch((1,), (x, y, torch.zeros(32, 32)), expected, (), 32 * 2**-24 * magnitude)
    code = Executable(linalg_of("multiply", target, pointers, SIZE=32))
    assert launch.deviations(code) == {}


def test_a_tensor_of_another_type_is_refused():
    with pytest.raises(TypeError, match="not a tensor of torch"):
        Executable(softmax_linalg(TARGETS[0])).run(
            (1,), torch.zeros(8).double(), torch.zeros(8), 8, 8
        )


def test_an_input_that_is_overwritten_is_noticed():
    """The control: a launch that takes its output for an input."""
    launch = softmax()
    assert Launch(launch.grid, launch.arguments, {}, ()).deviations(
        Executable(softmax_linalg(TARGETS[0]))
    ).keys() == {1}


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("place", "inside"), [(0, True), (31, True), (-1, False), (32, False)])
def test_a_mask_does_not_keep_a_gather_inside(place: int, inside: bool, target: Target):
    """triton-ascend reads all places and selects then, where upstream would not read."""
    pointers = {"x": "*fp32", "places": "*i32", "output": "*fp32", "size": "i32"}
    linalg = linalg_of("gather_if_inside", target, pointers, BLOCK=16)
    assert stays_inside(partial(gather_if_inside, place), linalg) == inside


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_mask_of_values_does_not_keep_a_store_inside(target: Target):
    """triton-ascend reads the whole tile, selects, and writes it back, what others own as well."""
    pointers = {"x": "*fp32", "output": "*fp32"}
    linalg = {
        block: linalg_of("store_positive", target, pointers, BLOCK=block) for block in (8, 16)
    }
    assert stays_inside(partial(store_positive, 8), linalg[8])
    assert not stays_inside(partial(store_positive, 8), linalg[16])
