"""The list of kernels is tested everywhere; the rest needs `make test-triton-ascend`."""

import os

ON_CPU = ["test_kernels_on_cpu.py", "test_linalg_on_cpu.py"]
LOWERED = ["test_controls.py", "test_hivm_report.py", "test_kernels_reach_hivmc.py"]
LOWERED += ["test_served_shapes.py"]

if not os.environ.get("TRITON_ASCEND_TESTS"):
    collect_ignore = LOWERED + ON_CPU
else:
    from linalg_on_cpu import MLIR

    collect_ignore = [] if MLIR.exists() else ON_CPU


def pytest_terminal_summary(terminalreporter) -> None:
    """The table of what was lowered; bits in use of each memory, counts of instructions."""
    passed = terminalreporter.stats.get("passed", [])
    rows = [pair for test in passed for pair in test.user_properties]
    if not rows:
        return
    terminalreporter.section("lowered up to the missing hivmc; nothing here is NPU code")
    width = max(len(kernel) for kernel, _ in rows)
    for kernel, counts in rows:
        terminalreporter.line(f"{kernel:{width}} {counts}")
    if collect_ignore:
        terminalreporter.line("MLIR 19 is absent: no kernel was executed on the CPU")
