"""Tiles stay within a machine's near memory, splits fill its cores, and what the kernels cannot
read goes to the reference; none of it asks the device for a length."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_ascend.ops.attention import reference, tiles, triton
from sglang_ascend.ops.attention.tiles import (
    ASCEND,
    ASCEND_950,
    H100,
    MIN_BLOCK,
    choose_num_splits,
    choose_tiles,
)

DEEPSEEK = {"query_width": 576, "key_width": 576, "sum_width": 512}
IN_PARTS = {"query_width": 576, "key_width": 576, "sum_width": 128}
HEAD_128 = {"query_width": 128, "key_width": 256, "sum_width": 128}


@pytest.mark.parametrize(
    ("machine", "num_rows", "widths", "element_size", "blocks"),
    [
        (H100, 16, DEEPSEEK, 2, (16, 32)),
        (H100, 64, DEEPSEEK, 2, (64, 32)),
        (H100, 512, DEEPSEEK, 2, (64, 32)),
        (H100, 64, DEEPSEEK, 4, (32, 16)),
        (replace(H100, factor_bytes=147 << 10), 64, DEEPSEEK, 2, (64, 16)),  # as an A100's
        (replace(H100, factor_bytes=83 << 10), 64, DEEPSEEK, 2, (16, 16)),  # a workstation's
        (H100, 32, HEAD_128, 2, (32, 64)),
        (ASCEND, 16, IN_PARTS, 2, (16, 128)),
        (ASCEND, 64, IN_PARTS, 2, (64, 128)),
        (ASCEND, 512, IN_PARTS, 2, (64, 128)),
        (ASCEND, 64, IN_PARTS, 4, (64, 32)),
        (ASCEND, 32, HEAD_128, 2, (32, 128)),
    ],
)
def test_the_tiles_of_real_models_are_those_of_the_arithmetic(
    machine, num_rows, widths, element_size, blocks
):
    tiles = choose_tiles(machine, num_rows, page_size=128, **widths, element_size=element_size)
    assert (tiles.block_m, tiles.block_n) == blocks


@pytest.mark.parametrize("machine", [H100, ASCEND], ids=["h100", "ascend"])
@pytest.mark.parametrize("element_size", [2, 4])
def test_no_tile_exceeds_its_machine(machine, element_size):
    for width in (16, 64, 128, 256, 512, 1024, 2048):
        for num_rows in (1, 16, 48, 512):
            tiles = choose_tiles(machine, num_rows, 128, width, 2 * width, width, element_size)
            if tiles is None:
                assert width > 256, "grouped heads of up to 256 fit everywhere"
                continue
            in_flight = tiles.block_m + 2 * machine.tiles_in_flight * tiles.block_n
            assert element_size * width * in_flight <= machine.factor_bytes
            assert 4 * tiles.block_m * width <= machine.sum_bytes
            assert min(tiles.block_m, tiles.block_n) >= MIN_BLOCK


@pytest.mark.parametrize(("page_size", "block_n"), [(256, 128), (128, 128), (32, 32), (48, 16)])
def test_a_tile_lies_in_one_page_where_it_cannot_be_gathered(page_size, block_n):
    tiles = choose_tiles(ASCEND, 16, page_size=page_size, **IN_PARTS, element_size=2)
    assert tiles.block_n == block_n


def test_pages_shorter_than_a_tile_are_for_the_reference_there():
    for page_size in (1, 8, 100):
        assert choose_tiles(ASCEND, 16, page_size=page_size, **IN_PARTS, element_size=2) is None
        assert choose_tiles(H100, 16, page_size=page_size, **DEEPSEEK, element_size=2) is not None


@pytest.mark.parametrize(
    ("machine", "num_programs", "max_kv_len", "num_splits"),
    [
        (H100, 16, 8192, 8),  # 16 requests, H = 16: 128 of 132 SMs
        (H100, 128, 8192, 1),  # 16 requests, H = 128: eight blocks of rows each
        (H100, 1, 8192, 64),
        (H100, 1, 1024, 8),  # no split is shorter than 128 keys
        (H100, 1, 1, 1),
        (H100, 1000, 8192, 1),
        (ASCEND, 4, 8192, 5),
    ],
)
def test_splits_fill_the_cores_and_no_more(machine, num_programs, max_kv_len, num_splits):
    assert choose_num_splits(machine, num_programs, max_kv_len) == num_splits


def mla_call(**changes):
    call = {
        "query": torch.zeros(8, 3, 120),
        "latent_cache": torch.zeros(64, 1, 120),
        "block_table": torch.zeros(2, 4, dtype=torch.int64),
        "kv_lens": torch.tensor([20, 30]),
    }
    sizes = {"query_len": 4, "page_size": 16, "scale": 1.0, "kv_lora_rank": 88}
    return {**call, **sizes, **changes}


def gqa_call(**changes):
    call = {
        "query": torch.zeros(8, 6, 40),
        "key_cache": torch.zeros(64, 3, 40),
        "value_cache": torch.zeros(64, 3, 40),
        "block_table": torch.zeros(2, 4, dtype=torch.int64),
        "kv_lens": torch.tensor([20, 30]),
    }
    return {**call, "query_len": 4, "page_size": 16, "scale": 1.0, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query": torch.zeros(8, 3, 120, dtype=torch.bfloat16)},
        {"latent_cache": torch.zeros(64, 1, 200, dtype=torch.float16)[..., :120]},
        {"block_table": torch.zeros(2, 9, dtype=torch.int32)[:, :4]},
        {"kv_lens": torch.tensor([20, 30], dtype=torch.int32)},
        {"page_size": 1},
        {"query": torch.zeros(8, 3, 88), "query_rope": torch.zeros(8, 3, 32)},
    ],
)
def test_mla_takes_what_its_pointers_can_read(changes):
    assert triton.accepts_mla(**mla_call(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"query": torch.zeros(3, 8, 120).transpose(0, 1)},
        {"query": torch.zeros(8, 3, 88), "query_rope": torch.zeros(8, 3, 120)[..., 88:]},
        {"query": torch.zeros(8, 3, 88), "query_rope": torch.zeros(8, 3, 16)},
        {"query": torch.zeros(8, 3, 120, dtype=torch.float64)},
        {"latent_cache": torch.zeros(64, 1, 120, dtype=torch.float8_e4m3fn)},
        {"latent_cache": torch.zeros(64, 1, 240)[..., ::2]},
        {"block_table": torch.zeros(4, 2, dtype=torch.int64).t()},
        {"kv_lens": torch.zeros(4, dtype=torch.int64)[::2]},
        {"kv_lens": torch.empty(2, dtype=torch.int64, device="meta")},
        {"query": torch.zeros(8, 3, 8064), "latent_cache": torch.zeros(4, 1, 8064)},
    ],
)
def test_mla_declines_what_they_cannot(changes):
    call = mla_call(**changes)
    assert not triton.accepts_mla(**call | {"kv_lora_rank": call["query"].shape[2] - 32})


def test_gqa_takes_heads_one_behind_another_and_declines_others():
    wide, apart = torch.zeros(64, 2, 3, 40), torch.zeros(64, 6, 40)
    assert triton.accepts_gqa(**gqa_call())
    assert triton.accepts_gqa(**gqa_call(key_cache=wide[:, 0], value_cache=wide[:, 1]))
    assert not triton.accepts_gqa(**gqa_call(key_cache=apart[:, ::2]))
    assert not triton.accepts_gqa(**gqa_call(value_cache=torch.zeros(3, 64, 40).transpose(0, 1)))
    assert not triton.accepts_gqa(**gqa_call(value_cache=torch.zeros(64, 3, 40).to(torch.int8)))


class Recorder:
    """Stands where a kernel does, and keeps the grid of each launch."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **constants: None


def test_a_launch_reads_no_length_on_the_host(monkeypatch, triton_interpreter):
    """Fake tensors have no values: whoever asks for one stops. The reference does, the control."""
    from sglang_ascend.ops.attention import triton_kernels, triton_latent_kernels

    recorders = {name: Recorder() for name in ("mla_split", "gqa_split", "merge_splits")}
    for name, recorder in recorders.items():
        module = triton_latent_kernels if name == "merge_splits" else triton_kernels
        monkeypatch.setattr(module, name, recorder)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        mla, gqa = (
            {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in call.items()
            }
            for call in (
                mla_call(block_table=torch.zeros(2, 64, dtype=torch.int64)),
                gqa_call(block_table=torch.zeros(2, 64, dtype=torch.int64)),
            )
        )
        assert triton.accepts_mla(**mla)
        assert triton.accepts_gqa(**gqa)
        assert triton.paged_mla(**mla).shape == (8, 3, 88)
        assert triton.paged_gqa(**gqa).shape == (8, 6, 40)
        with pytest.raises(DataDependentOutputException):
            reference.paged_mla(**mla)
    # 1024 positions that the table can hold are eight splits, whatever the lengths are.
    assert recorders["mla_split"].grids == [(1, 8, 2)]
    assert recorders["gqa_split"].grids == [(1, 8, 6)]
    assert recorders["merge_splits"].grids == [(24, 1), (48, 1)]


def test_a_merge_of_many_rows_is_several_launches_of_whole_requests(monkeypatch):
    """triton-ascend refuses a launch of 65,536 programs: 32 requests of 512 rows, four a row."""
    from sglang_ascend.ops.attention import tiles, triton_latent_kernels

    launches = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *operands, **constants: launches.append((grid, operands))

    monkeypatch.setattr(triton_latent_kernels, "merge_splits", Launched())
    monkeypatch.setattr(tiles, "machine_of", lambda device: tiles.ASCEND)
    output = torch.empty(32 * 4, 128, 512, device="meta")
    tiles.Splits(output, query_len=4, num_kv_heads=1, num_splits=1, in_memory=True).merged()
    assert [grid for grid, _ in launches] == [(31 * 512, 4), (512, 4)]
    for (num_rows, _), (outputs, masses, merged, _) in launches:
        assert num_rows == len(masses)
        assert len(outputs) == len(masses) == len(merged) * 128


def test_a_gpu_is_asked_once_for_its_cores_and_shared_memory(monkeypatch):
    asked = []

    def get_device_properties(index):
        asked.append(index)
        return {"multiprocessor_count": 108, "max_shared_mem": 163 << 10}

    driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace()))
    driver.active.utils.get_device_properties = get_device_properties
    monkeypatch.setattr("triton.runtime.driver", driver)
    monkeypatch.setattr(tiles, "gpu_of", cache(tiles.gpu_of.__wrapped__))
    for _ in range(2):
        machine = tiles.machine_of(torch.device("cuda", 3))
    assert (machine.num_cores, machine.factor_bytes) == (108, 147 << 10)
    assert asked == [3]


@pytest.mark.parametrize(
    ("name", "machine"),
    [("Ascend910B3", ASCEND), ("Ascend910_9392", ASCEND), ("Ascend950PR_9599", ASCEND_950)],
)
def test_an_npu_is_asked_for_its_name(name, machine, monkeypatch):
    npu = SimpleNamespace(get_device_name=lambda index: name)
    monkeypatch.setattr(torch, "get_device_module", lambda device: npu)
    monkeypatch.setattr(tiles, "npu_of", tiles.npu_of.__wrapped__)
    assert tiles.machine_of(SimpleNamespace(type="npu", index=0)) is machine
