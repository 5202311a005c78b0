"""The lint sees what would run one element at a time, and how much memory a kernel holds.

The control kernels differ in what the compiler can make of them, not in what we count.
"""

import re
from pathlib import Path

import pytest
from hivm_report import Report, innermost_loops, report_of, used_bits
from kernel_list import Kernel
from lowering import lower, run_bishengir, to_linalg
from targets import TARGETS, Target

A2, A3, A5 = TARGETS


def control(function: str, arguments: dict[str, str], **constants: int) -> Kernel:
    return Kernel(function, "control_kernels", function, arguments, constants)


def add(element: str) -> Kernel:
    pointer = f"*{element}"
    return control("add", {"x": pointer, "y": pointer, "output": pointer, "size": "i32"}, BLOCK=256)


CUMULATE = control("cumulate", {"x": "*fp32", "output": "*fp32"}, BLOCK=256)
BY_PLACE = {"x": "*fp32", "places": "*i32", "output": "*fp32"}
GATHER = control("gather_elements", BY_PLACE, BLOCK=256)
SCATTER = control("scatter_elements", BY_PLACE, BLOCK=256)
SUM_ROWS = control("sum_rows", BY_PLACE | {"num_rows": "i32"}, BLOCK=16, WIDTH=64)


def lowered_report(kernel: Kernel, target: Target, folder: Path) -> Report:
    return report_of(lower(kernel, target, folder).hivm)


@pytest.mark.parametrize(
    ("kernel", "target", "scalar_loops", "row_loops"),
    [
        (add("fp32"), A2, 0, 0),
        (add("fp32"), A3, 0, 0),
        (add("fp32"), A5, 0, 0),
        (add("i64"), A2, 1, 0),
        (add("i64"), A3, 1, 0),
        (add("i64"), A5, 0, 0),
        (CUMULATE, A2, 1, 0),
        (CUMULATE, A5, 0, 0),
        (GATHER, A2, 1, 0),
        (GATHER, A5, 1, 0),
        (SCATTER, A2, 1, 0),
        (SCATTER, A5, 1, 0),
        (SUM_ROWS, A2, 0, 1),
        (SUM_ROWS, A5, 0, 1),
    ],
    ids=str,
)
def test_a_loop_over_elements_is_told_from_vectors_and_from_rows(
    kernel: Kernel, target: Target, scalar_loops: int, row_loops: int, tmp_path: Path
):
    """Eight bytes an element are what turns the same addition into a loop on a 910."""
    report = lowered_report(kernel, target, tmp_path)
    assert (len(report.scalar_loops), len(report.row_loops)) == (scalar_loops, row_loops)


def test_vector_and_matrix_instructions_are_told_apart(tmp_path: Path):
    pointers = {"x": "*fp32", "y": "*fp32", "output": "*fp32"}
    for target in TARGETS:
        product = lowered_report(
            control("multiply", pointers, SIZE=32), target, tmp_path / f"multiply-{target}"
        )
        total = lowered_report(add("fp32"), target, tmp_path / f"add-{target}")
        assert (product.matrix, total.matrix) == (1, 0)
        assert total.vector > 0
        assert total.transfers == 3


@pytest.mark.parametrize("kernel", [add("fp32"), CUMULATE, SUM_ROWS], ids=str)
def test_the_memory_in_use_is_what_bishengir_says(kernel: Kernel, tmp_path: Path):
    """Oracle: the program for the 950 can print it; the others cannot, so addresses are read."""
    _, linalg = to_linalg(kernel, A5)
    print_it = "--enable-print-memory-allocated-size"
    process, hivm = run_bishengir(linalg, A5, tmp_path, (*A5.flags, print_it))
    assert hivm is not None
    printed = re.findall(r"Allocated UB size = (\d+) bits", process.stdout)
    assert [str(used_bits(hivm)["ub"])] == printed


LOOPS = """
module {
  func.func private @vadd(memref<8xf32>)
  func.func @kernel(%arg0: memref<8xf32>) attributes {a = #b<c>} {
    scf.for %i = %c0 to %c8 step %c1 {
      scf.for %j = %c0 to %c8 step %c1 {
        %0 = memref.load %arg0[%j] : memref<8xf32>
        memref.store %0, %arg0[%j] : memref<8xf32>
      } {hivm.parallel_loop}
      scf.for %j = %c0 to %c8 step %c1 {
        %0 = memref.load %arg0[%j] : memref<8xf32>
        func.call @vadd(%arg0) : (memref<8xf32>) -> ()
      }
    }
    %1 = scf.while (%x = %0) : (i32) -> i32 {
      scf.condition(%c) %x : i32
    } do {
    ^bb0(%y: i32):
      memref.store %y, %arg0[%c0] : memref<8xf32>
      scf.yield %y : i32
    }
    cf.br ^bb1(%c0 : index)
  ^bb1(%2: index):  // 2 preds: ^bb0, ^bb2
    cf.cond_br %3, ^bb2, ^bb3
  ^bb2:  // pred: ^bb1
    %4 = memref.load %arg0[%2] : memref<8xf32>
    cf.br ^bb1(%5 : index)
  ^bb3:  // pred: ^bb1
    memref.store %4, %arg0[%c0] : memref<8xf32>
    return
  }
}
"""


def test_regions_and_branches_backwards_are_loops_and_only_the_innermost_count():
    assert [loop.line for loop in innermost_loops(LOOPS)] == [6, 10, 15, 23]
    assert [loop.line for loop in report_of(LOOPS).scalar_loops] == [6, 15, 23]
