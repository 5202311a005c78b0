"""What `make bench-gpu` asks of the kernels before it times them finds a wrong one; here they are
interpreted, as there is no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_correctness
from benchmarks.gpu_correctness import Sizes
from sglang_ascend.ops import attention, sampling
from sglang_ascend.verify.checks import Check

SMALL = Sizes(
    heads=(1, 3),
    query_lens=(2,),
    page_sizes=(16,),
    kv_lens=(2, 17),
    dtypes=(torch.float32,),
    mla_widths=(16, 8),
    filtered=((40, 8), (65, 4)),
)


@pytest.fixture
def interpreted(monkeypatch, triton_interpreter) -> None:
    """The kernels alone: the bodies of this CPU are checked in tests/verify."""
    for name in ("check_operators", "check_synchronisation"):
        monkeypatch.setattr(gpu_correctness, name, lambda device, progress: [])


def failures(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.passed is False]


@pytest.mark.usefixtures("interpreted")
def test_the_kernels_and_the_controls_pass():
    checks = gpu_correctness.check_kernels("cpu", SMALL)
    assert failures(checks) == []
    assert sum(check.passed is True for check in checks) == 2 + 2 + 2 * len(SMALL.filtered)


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_that_is_wrong_or_does_not_compile_is_found(monkeypatch):
    def zeros(query: torch.Tensor, *rest: Any, kv_lora_rank: int, **sizes: Any) -> torch.Tensor:
        return torch.zeros(*query.shape[:2], kv_lora_rank)

    def does_not_compile(*rest: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    replace_body(monkeypatch, attention.paged_mla, zeros)
    replace_body(monkeypatch, sampling.filter_probs, does_not_compile)
    found = {check.name: check for check in gpu_correctness.check_kernels("cpu", SMALL)}
    assert failures(list(found.values())) == ["paged_mla, torch.float32", "filter_checks"]
    assert "1 heads, 2 rows, pages of 16" in found["paged_mla, torch.float32"].note
    assert "shared memory" in found["filter_checks"].note


def replace_body(monkeypatch: pytest.MonkeyPatch, op: Any, function: Any) -> None:
    right = op.implementation
    chosen = {"triton": function}
    monkeypatch.setattr(op, "implementation", lambda name: chosen.get(name) or right(name))
