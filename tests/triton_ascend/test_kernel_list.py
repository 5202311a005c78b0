"""No Triton kernel escapes the list of those lowered for Ascend, which is what the sources say.

Sources are read, not imported, so that this holds in every environment and in `make test`.
"""

import dataclasses
from pathlib import Path

from kernel_list import ROOT, Kernel, jit_functions, listed_kernels, unlisted
from targets import TARGETS

KERNELS = listed_kernels()
FUNCTIONS = jit_functions(ROOT / "sglang_ascend")


def mismatches(kernel: Kernel) -> list[str]:
    """How an entry of the list differs from the function that it names."""
    function = FUNCTIONS.get((kernel.module, kernel.function))
    if function is None:
        return [f"{kernel}: {kernel.module} has no Triton kernel {kernel.function}"]
    found = []
    given = [name for name in function.parameters if name not in kernel.constants]
    if given != list(kernel.arguments):
        found.append(f"{kernel}: its arguments are {given}")
    if not function.constexprs <= kernel.constants.keys() <= set(function.parameters):
        found.append(f"{kernel}: its constants are {sorted(function.constexprs)}")
    return found


def test_every_kernel_is_in_the_list_or_called_by_one_that_is():
    assert unlisted(KERNELS, FUNCTIONS) == set()


def test_the_list_is_what_the_sources_say():
    assert [problem for kernel in KERNELS for problem in mismatches(kernel)] == []


def test_every_entry_has_a_name_of_its_own():
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


def test_budgets_and_kernels_are_for_targets_that_exist():
    names = {target.name for target in TARGETS}
    for kernel in KERNELS:
        assert {*kernel.scalar_loops, *kernel.row_loops, *kernel.only} <= names


SEEDED = {
    "ops/a.py": """
import triton
from numba import njit
from package.ops.b import shared

@triton.jit
def listed(x, N: int):
    helper(x); shared(x)

@triton.jit
def helper(x):
    pass

@triton.jit(do_not_specialize=["x"])
def forgotten(x):
    pass

@njit
def of_numba(x):
    pass
""",
    "ops/b.py": """
from triton import jit

@jit
def shared(x):
    pass

@jit
def also_forgotten(x):
    listed(x)
""",
}


def test_a_forgotten_kernel_is_found_and_a_helper_is_not(tmp_path):
    for name, text in SEEDED.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    functions = jit_functions(tmp_path / "package")
    kernel = Kernel("listed", "package.ops.a", "listed", {}, {})
    assert unlisted([kernel], functions) == {
        ("package.ops.a", "forgotten"),
        ("package.ops.b", "also_forgotten"),
    }


def test_an_entry_that_is_not_what_the_source_says_is_found():
    kernel = KERNELS[0]
    (first, type_of_first), *others = kernel.arguments.items()
    wrong = [
        {"function": "nosuch"},
        {"arguments": dict([*others, (first, type_of_first)])},
        {"arguments": dict(others)},
        {"constants": {}},
        {"constants": kernel.constants | {"NOSUCH": 1}},
    ]
    for change in wrong:
        assert mismatches(dataclasses.replace(kernel, **change)), change


def test_the_list_is_in_no_wheel():
    assert not list((ROOT / "sglang_ascend").rglob("kernels.toml"))
    assert Path(__file__).parent.is_relative_to(ROOT / "tests")
