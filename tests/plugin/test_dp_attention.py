"""Data-parallel attention: what each rank's step takes for the size of a batch, what every forward
says of its rows, and what a CPU puts in place of what SGLang exchanges rows with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from resolved_arguments import assert_refused, resolve, resolved

from sglang_ascend.models.catalog import model_path
from sglang_ascend.plugin.device import CUDA, NPU

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]
NUM_RANKS = 2


def parallel(attn_dp_size: int = NUM_RANKS, attn_tp_size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(attn_dp_size=attn_dp_size, attn_tp_size=attn_tp_size)


@pytest.mark.parametrize(
    ("counts", "attn_tp_size", "size"),
    [([3, 1], 1, 3), ([0, 2], 1, 2), ([1, 0], 2, 2), ([3, 5], 2, 6), ([4, 4], 2, 4)],
)
def test_every_rank_steps_on_as_many_requests_as_the_fullest(
    monkeypatch, counts, attn_tp_size, size
):
    from sglang_ascend.plugin.mtp import forwards

    monkeypatch.setattr(forwards, "get_parallel", lambda: parallel(attn_tp_size=attn_tp_size))
    batches = [SimpleNamespace(reqs=[None] * n, global_num_tokens=counts) for n in counts]
    assert [forwards.common_batch_size(batch) for batch in batches] == [size] * len(counts)


def test_a_rank_alone_steps_on_its_own(monkeypatch):
    from sglang_ascend.plugin.mtp import forwards

    monkeypatch.setattr(forwards, "get_parallel", lambda: parallel(attn_dp_size=1))
    monkeypatch.setattr(forwards, "require_gathered_buffer", lambda: False)
    batch = SimpleNamespace(reqs=[None] * 3, global_num_tokens=None)
    assert forwards.common_batch_size(batch) == 3


@pytest.fixture
def published(monkeypatch) -> dict[str, object]:
    """What the layers are told, which SGLang keeps outside of the batch."""
    from sglang_ascend.plugin.mtp import forwards

    said: dict[str, object] = {}
    monkeypatch.setattr(forwards, "get_parallel", parallel)
    monkeypatch.setattr(
        forwards, "set_dp_buffer_len_from_batch", lambda batch: said.update(batch=batch)
    )
    monkeypatch.setattr(forwards, "set_is_extend_in_batch", lambda is_: said.update(extend=is_))
    return said


def test_a_forward_says_how_many_rows_every_rank_has_and_asks_the_head_for(published):
    from sglang_ascend.plugin.mtp.forwards import exchange_rows

    runner = SimpleNamespace(attn_tp_sequence_sharded=lambda num_rows: num_rows == 8)
    batch = SimpleNamespace(seq_lens=torch.zeros(2, dtype=torch.int64))
    exchange_rows(batch, runner, num_rows=8, num_logits=2)
    assert batch.global_num_tokens_cpu == batch.global_num_tokens_gpu.tolist() == [8, 8]
    of_head = batch.global_num_tokens_for_logprob_cpu
    assert of_head == batch.global_num_tokens_for_logprob_gpu.tolist() == [2, 2]
    assert batch.global_dp_buffer_len == 16 and batch.dp_padding_mode.is_max_len()
    assert batch.attn_tp_sequence_sharded is True
    # A view of another forward's batch has that one's places still.
    assert batch.dp_local_start_pos is batch.dp_local_num_tokens is None
    assert published == {"batch": batch, "extend": False}


@pytest.mark.parametrize(("offset", "count"), [(0, 2), (2, 3), (3, 0), (3, 9)])
def test_rows_are_copied_where_a_loop_copies_them(offset, count):
    from sglang_ascend.plugin.cpu.replacements import copy_rows

    for into_all in (True, False):
        src, dst = torch.arange(10.0).view(5, 2) + 1, torch.zeros(5, 2)
        expected = dst.clone()
        for row in range(min(count, 5 - offset)):
            place, origin = (offset + row, row) if into_all else (row, offset + row)
            expected[place] = src[origin]
        copy_rows(dst, src, 0, torch.tensor(offset), torch.tensor(count), not into_all)
        assert torch.equal(dst, expected)


def test_collectives_of_rows_are_found_on_a_cpu(monkeypatch):
    from sglang.srt.distributed import parallel_state

    from sglang_ascend.plugin.cpu.replacements import register_collectives

    register_collectives()

    class Group:
        def _all_gather_into_tensor(self, output, input):
            output.copy_(torch.cat([input, input + 1]))

        def _reduce_scatter_tensor(self, output, input):
            output.copy_(input[: len(output)] * 2)

    group = Group()
    monkeypatch.setitem(parallel_state._groups, "two", lambda: group)
    gathered, scattered = torch.zeros(4), torch.zeros(2)
    parallel_state.reg_all_gather_into_tensor(gathered, torch.tensor([1.0, 5.0]), "two")
    parallel_state.reg_reduce_scatter_tensor(scattered, gathered, "two")
    assert gathered.tolist() == [1, 5, 2, 6] and scattered.tolist() == [2, 10]


def test_gloo_gathers_rows_into_a_tensor_that_has_a_dimension_of_ranks():
    """As SGLang gathers logits; gloo as it is called refuses, which is the control."""
    from torch import distributed

    from sglang_ascend.plugin.cpu.replacements import gather_side_by_side

    store, give_up = distributed.HashStore(), timedelta(seconds=20)
    rows = torch.arange(6.0).view(3, 2)
    gathered = torch.stack([rows, rows + 100])

    def gather(rank: int) -> tuple[str, torch.Tensor]:
        group = distributed.ProcessGroupGloo(store, rank, NUM_RANKS, give_up)

        def original(self, output: torch.Tensor, input: torch.Tensor) -> None:
            group._allgather_base(output, input).wait()

        with pytest.raises(RuntimeError) as refusal:
            original(None, torch.zeros(2, 3, 2), gathered[rank])
        found = torch.zeros(2, 3, 2)
        gather_side_by_side(original, None, found, gathered[rank])
        as_rows = torch.zeros(6, 2)
        gather_side_by_side(original, None, as_rows, gathered[rank])
        assert torch.equal(as_rows.view_as(found), found)
        return str(refusal.value), found

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for refusal, found in pool.map(gather, range(NUM_RANKS)):
            assert "invalid tensor size" in refusal
            assert torch.equal(found, gathered)


DP_ATTENTION = "--speculative-algorithm MTP --tp-size 2 --dp-size 2 --enable-dp-attention"


@pytest.fixture
def nano_deepseek(monkeypatch) -> Path:
    # Several ranks would share the cores of this process, and of every server that it starts.
    monkeypatch.setattr("sglang_ascend.plugin.mtp.ranks.share_machine", lambda num_ranks: None)
    return model_path("nano-deepseek")


@pytest.mark.parametrize("head", ["", "--enable-dp-lm-head --moe-dense-tp-size 1"])
def test_both_spellings_are_served(nano_deepseek, head):
    for flags in (DP_ATTENTION, "--speculative-algorithm MTP --tp-size 2 --attn-dp-size 2"):
        server_args = resolve(nano_deepseek, f"{flags} {head}")
        found = {name: resolved(server_args, name) for name in ("attn_dp_size", "dp_size")}
        assert found == {"attn_dp_size": 2, "dp_size": 1}
        assert not resolved(server_args, "sleep_on_idle")


@pytest.mark.parametrize(
    "flags",
    [
        "--speculative-adaptive",
        "--speculative-use-rejection-sampling",
        "--enable-mixed-chunk",
        "--disaggregation-mode decode",
        "--ep-size 2",
    ],
)
def test_what_was_not_seen_to_keep_ranks_together_is_refused(nano_deepseek, flags):
    flag = flags.split()[0]
    assert_refused(
        nano_deepseek, f"{DP_ATTENTION} {flags}", f"(or --enable-dp-attention) with {flag}"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("SGLANG_ASCEND_LOOKUP_DRAFTS", "8"), ("SGLANG_ASCEND_LOSSY_ACCEPTANCE", "threshold:0.5")],
)
def test_what_lets_a_rank_choose_its_forwards_is_refused(nano_deepseek, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert_refused(nano_deepseek, DP_ATTENTION, f"(or --enable-dp-attention) with {name}")


def test_several_ranks_share_the_heads_of_a_request(nano_deepseek):
    flags = "--speculative-algorithm MTP --tp-size 6 --attn-dp-size 2"
    assert resolved(resolve(nano_deepseek, flags), "attn_dp_size") == 2
    # 4,096 tokens in three parts.
    assert_refused(
        nano_deepseek,
        f"{flags} --enable-dp-lm-head",
        "with --enable-dp-lm-head and a --tp-size of 6",
    )


def test_other_models_are_refused(tiny_mimo, nano_deepseek):
    assert_refused(tiny_mimo, DP_ATTENTION, "--enable-dp-attention) with MiMoForCausalLM")


@pytest.mark.parametrize("tp_size", [2, 4])
def test_an_npu_is_refused_several_ranks_for_a_request(monkeypatch, tp_size):
    from sglang_ascend.plugin.mtp import refusals

    server_args = SimpleNamespace(tp_size=tp_size, attn_dp_size=2)
    assert refusals._not_run_on_npu(server_args) == {}
    monkeypatch.setattr(refusals, "device_profile", lambda: NPU)
    assert any(refusals._not_run_on_npu(server_args).values()) == (tp_size > 2)


def test_a_device_whose_step_is_sglang_s_is_refused(nano_deepseek, monkeypatch):
    from sglang_ascend.plugin.mtp import refusals

    monkeypatch.setattr(refusals, "device_profile", lambda: CUDA)
    assert_refused(nano_deepseek, DP_ATTENTION, "--enable-dp-attention) on this device")
