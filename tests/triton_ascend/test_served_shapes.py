"""Attention as the launcher launches it, for heads, groups and splits that are served: each kernel
reaches the code generator on three chips and takes no lock. Constants are recorded, not written
down. An NPU has pages of 128.
"""

import pytest
import torch
from hivm_report import takes_lock
from kernel_list import Kernel
from lowering import lower
from targets import TARGETS, Target

from sglang_ascend.ops.attention import tiles, triton
from sglang_ascend.ops.attention.tiles import ASCEND, ASCEND_950

PAGE_SIZE, RANK, ROPE, HEAD_DIM = 128, 512, 64, 128
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    int: "i32",
    float: "fp32",
}
# Rows of a request: K = 3 verified, one drafted.
QUERY_LENS = (4, 1)
HEADS = (8, 16, 128)
GROUPS = (4, 8, 12)


class Launches:
    """Stands where a kernel does, and keeps each launch as an entry of the list of kernels."""

    def __init__(self, kernel, found: list[Kernel]) -> None:
        self.fn, self.found = kernel, found

    def __getitem__(self, grid):
        def launch(*args, **constants):
            names = [name for name in self.fn.arg_names if name not in constants]
            types = [TYPES[getattr(argument, "dtype", type(argument))] for argument in args]
            of_triton = {"num_warps", "num_stages"}
            self.found.append(
                Kernel(
                    self.fn.fn.__name__,
                    self.fn.fn.__module__,
                    self.fn.fn.__name__,
                    dict(zip(names, types, strict=True)),
                    {name: value for name, value in constants.items() if name not in of_triton},
                )
            )

        return launch


@pytest.fixture
def launched(monkeypatch):
    """The kernels of every launch from here on, none of which is executed."""
    from sglang_ascend.ops.attention import (
        triton_kernels,
        triton_latent_kernels,
        triton_memory_kernels,
    )

    found: list[Kernel] = []
    for module, names in (
        (triton_kernels, ("gqa_split", "mla_split")),
        (triton_latent_kernels, ("mla_in_parts", "merge_splits")),
        (triton_memory_kernels, ("mla_in_memory",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Launches(getattr(module, name), found))
    return found


def launch(num_heads: int, num_kv_heads: int | None, query_len: int) -> None:
    """One request; latent attention where there are no key heads."""
    table, lens = torch.zeros(1, 32, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    sizes = {"query_len": query_len, "page_size": PAGE_SIZE, "scale": 0.1}

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16)

    if num_kv_heads is not None:
        cache = empty(PAGE_SIZE, num_kv_heads, HEAD_DIM)
        triton.paged_gqa(empty(query_len, num_heads, HEAD_DIM), cache, cache, table, lens, **sizes)
        return
    parts = {
        "query_rope": empty(query_len, num_heads, ROPE),
        "rope_cache": empty(PAGE_SIZE, 1, ROPE),
        "kv_lora_rank": RANK,
    }
    query, cache = empty(query_len, num_heads, RANK), empty(PAGE_SIZE, 1, RANK)
    triton.paged_mla(query, cache, table, lens, **sizes, **parts)


def check(launched, monkeypatch, target: Target, splits: int, tmp_path, *shape) -> None:
    machine = ASCEND_950 if target is TARGETS[2] else ASCEND
    monkeypatch.setitem(tiles.MACHINES, "cpu", machine)
    monkeypatch.setattr(triton, "choose_num_splits", lambda *_: splits)
    launch(*shape)
    assert launched
    assert len(launched) == 1 or launched[1].function == "merge_splits"
    for place, kernel in enumerate(launched):
        lowered = lower(kernel, target, tmp_path / str(place))
        assert lowered.retried == (), f"{kernel} fits only with less buffering"
        assert not takes_lock(lowered.hivm), kernel


SHAPES = [(heads, None, length) for heads in HEADS for length in QUERY_LENS]
SHAPES += [(group, 1, length) for group in GROUPS for length in QUERY_LENS]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] == 4], ids=str)
def test_served_shapes_reach_the_code_generator(shape, target, launched, monkeypatch, tmp_path):
    check(launched, monkeypatch, target, ASCEND.num_cores, tmp_path, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("splits", [1, ASCEND.num_cores])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_splits_and_without_they_do(shape, splits, target, launched, monkeypatch, tmp_path):
    check(launched, monkeypatch, target, splits, tmp_path, *shape)


def test_any_number_of_splits_is_the_same_kernel(launched, monkeypatch):
    """So that one number above 1 stands for all."""
    of_number = []
    for splits in range(2, ASCEND.num_cores + 1):
        launched.clear()
        monkeypatch.setitem(tiles.MACHINES, "cpu", ASCEND)
        monkeypatch.setattr(triton, "choose_num_splits", lambda *_, splits=splits: splits)
        for shape in SHAPES:
            launch(*shape)
        of_number.append(list(launched))
    assert all(kernels == of_number[0] for kernels in of_number)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_kernel_that_takes_a_lock_would_be_seen(target: Target, tmp_path):
    arguments = {"x": "*i32", "output": "*i32"}
    kernel = Kernel("locked", "control_kernels", "exchange", arguments, {"BLOCK": 64})
    assert takes_lock(lower(kernel, target, tmp_path).hivm)
