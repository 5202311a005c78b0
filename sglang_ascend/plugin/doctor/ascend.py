"""The checks of `sglang-ascend doctor` that only a machine with an NPU asks for."""

from __future__ import annotations

from sglang_ascend import stack
from sglang_ascend.plugin.doctor.report import Section

# Of which the schemas and the quoted documentation are (tests/npu_emulation/test_constraints.py).
DESCRIBED = ("torch_npu 2.10.0.post7", "2.13.0")


def check_stack(installed: stack.Installed) -> Section:
    """What an NPU asks for beside SGLang, compared with the stack that it comes nearest to."""
    nearest = stack.nearest(installed)
    rows = tuple(
        (part, installed.versions[part] or "not found", nearest.versions[part])
        for part in stack.PARTS
    )
    columns = ("part", "installed", f"{nearest.publisher} ({nearest.source})")
    return Section("Ascend stack", columns, rows, tuple(stack.problems(installed)))


def check_constraints() -> Section:
    """What torch_npu's operators ask of a call, compared with the torch_npu installed here."""
    from sglang_ascend.ops.npu import CONSTRAINTS, difference, documentation

    title, columns = "Constraints of torch_npu", ("operator", "rules", "installed")
    docs = documentation()
    if docs is None:
        return Section(title, columns, (("all", "none compared", "torch_npu is not installed"),))
    found = {name: difference(constraints, docs) for name, constraints in CONSTRAINTS.items()}
    rows = tuple(
        (name, str(len(CONSTRAINTS[name].rules)), problem or "the same")
        for name, problem in found.items()
    )
    problems = tuple(
        f"{problem}: {', '.join(DESCRIBED)} are described here; install the one for your torch."
        for problem in found.values()
        if problem
    )
    return Section(title, columns, rows, problems)
