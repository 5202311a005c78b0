"""What Ascend's compiler would refuse is refused here, with the kernel, the chip and the reason."""

import dataclasses
from pathlib import Path

import pytest
from kernel_list import Kernel
from lowering import MemoryOverflow, NotLowered, lower, to_hivm, to_linalg
from targets import TARGETS, Target

UB_BITS = {"Ascend910B3": 192 << 13, "Ascend910_9392": 192 << 13, "Ascend910_9589": 248 << 13}


def add(block: int, function: str = "add") -> Kernel:
    arguments = {"x": "*fp32", "y": "*fp32", "output": "*fp32", "size": "i32"}
    return Kernel(f"add {block}", "control_kernels", function, arguments, {"BLOCK": block})


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_tile_larger_than_the_unified_buffer_is_an_error_with_both_sizes(
    target: Target, tmp_path: Path
):
    with pytest.raises(MemoryOverflow, match=f"add 131072 for {target} .* ub overflow") as caught:
        lower(add(131072), target, tmp_path)
    assert caught.value.memory == "ub"
    assert caught.value.asked_bits == 2 * 131072 * 32
    assert caught.value.available_bits == UB_BITS[target.name]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_same_kernel_with_a_smaller_tile_is_lowered(target: Target, tmp_path: Path):
    assert "func.func @add" in lower(add(1024), target, tmp_path).hivm


@pytest.mark.parametrize(("block", "doubled"), [(8192, True), (16384, False)])
def test_a_tile_that_fits_only_without_double_buffering_is_told(
    block: int, doubled: bool, tmp_path: Path
):
    lowered = lower(add(block, "add_tile_by_tile"), TARGETS[0], tmp_path)
    without = "enable-auto-multi-buffer to false" in " ".join(lowered.retried)
    assert without != doubled


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_chip_that_does_not_exist_is_refused(target: Target, tmp_path: Path):
    nowhere = dataclasses.replace(target, name="Ascend910Z9")
    with pytest.raises(NotLowered, match="Ascend910Z9 stops in bishengir"):
        lower(add(1024), nowhere, tmp_path)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_linalg_that_makes_no_sense_is_refused(target: Target, tmp_path: Path):
    _, linalg = to_linalg(add(1024), target)
    broken = linalg.replace("arith.addf", "arith.nonsense", 1)
    assert broken != linalg
    with pytest.raises(NotLowered, match="stops in bishengir"):
        to_hivm("add", broken, target, tmp_path)


def test_a_tensor_descriptor_stops_in_the_front_end(tmp_path: Path):
    arguments = {"x": "*fp32", "output": "*fp32"}
    kernel = Kernel("copy", "control_kernels", "copy_by_descriptor", arguments, {"SIZE": 16})
    with pytest.raises(NotLowered, match="stops in triton's front end"):
        lower(kernel, TARGETS[0], tmp_path)


def test_a_program_that_calls_itself_hivmc_is_never_run(tmp_path: Path, monkeypatch):
    """With CANN installed, or a stand-in on the PATH, the verdict is the same as without."""
    left = tmp_path / "ran"
    for name in ("hivmc", "hivmc-a5"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ntouch {left}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    for target in TARGETS:
        assert lower(add(1024), target, tmp_path / target.name).hivm
    assert not left.exists()
