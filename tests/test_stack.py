"""The table of stacks for an NPU: what is missing or mixed is one sentence with its remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_ascend import stack
from sglang_ascend.plugin.doctor.ascend import check_stack
from sglang_ascend.stack import CANN, PARTS, STACKS, Installed

GUIDE = STACKS[0]
WHOLE = Installed(
    {
        "python": "3.11.7",
        CANN: "9.0.0",
        "torch": "2.10.0+cpu",
        "torch_npu": "2.10.0.post7",
        "triton-ascend": "3.2.1.dev20260530",
        stack.KERNELS: "2026.5.1.post3",
    },
    has_kernels=True,
    upstream_triton="3.2.0",
    triton_knows_ascend=True,
)


def changed(**parts: str | None) -> Installed:
    """`WHOLE` but for some versions; `_` stands for `-`."""
    named = {name.replace("triton_", "triton-"): found for name, found in parts.items()}
    return replace(WHOLE, versions={**WHOLE.versions, **named})


def test_a_whole_stack_has_no_problem_and_is_known():
    section = check_stack(WHOLE)
    assert section.problems == ()
    assert [part for part, _, _ in section.rows] == list(PARTS)
    assert GUIDE.publisher in section.columns[2] and GUIDE.source in section.columns[2]
    assert all(stack.agrees(GUIDE, WHOLE, part) for part in PARTS)


@pytest.mark.parametrize(
    ("installed", "named", "remedy"),
    [
        (replace(WHOLE, has_kernels=False), "sgl_kernel_npu", "docker/Dockerfile"),
        (changed(torch_npu=None), "torch_npu is not installed", "docker/Dockerfile"),
        (changed(triton_ascend=None), "triton-ascend is not installed", "CANN asks for."),
        (changed(torch="2.13.0"), "torch_npu 2.10.0.post7", "install torch==2.10.0."),
        (changed(triton_ascend="3.2.0"), "for CANN 8.5", "install triton-ascend 3.2.1."),
        (changed(CANN="9.1.0"), "found CANN 9.1.0", "install triton-ascend 3.2.2."),
        (changed(CANN="8.3.RC1"), "found CANN 8.3.RC1", "install CANN 9.0."),
        (replace(WHOLE, triton_knows_ascend=False), "upstream's 3.2.0", "--force-reinstall"),
    ],
)
def test_what_is_missing_or_mixed_is_said(installed, named, remedy):
    said = [problem for problem in stack.problems(installed) if named in problem]
    assert len(said) == 1 and remedy in said[0]
    assert ". " not in said[0] and said[0].endswith(".")


def test_an_old_compiler_shares_no_folder_with_upstream_triton():
    old = changed(triton_ascend="3.2.0", CANN="8.5.0")
    (said,) = stack.problems(old)
    assert "pip uninstall triton" in said
    assert stack.problems(replace(old, upstream_triton=None)) == []


def test_the_nearest_stack_is_the_one_most_parts_belong_to():
    for known in STACKS:
        assert stack.nearest(replace(WHOLE, versions=known.versions)) is known
    mixed = changed(CANN="9.1.0", python="3.12.3")
    assert stack.nearest(mixed) is GUIDE


def test_nothing_is_said_of_stacks_where_no_npu_is_meant(monkeypatch):
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert not stack.is_wanted()
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend/cann")
    assert stack.is_wanted()


def test_what_is_installed_here_is_read():
    here = Installed.here()
    assert here.versions["torch"] == torch.__version__
    assert here.versions["torch_npu"] is None and not here.has_kernels
    assert len(stack.problems(here)) >= 3
