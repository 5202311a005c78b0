"""What a program costs is counted exactly: launches by name, copies by kind, synchronisations.

The programs are what decode steps are made of; the counts are of the real torch_npu's host code.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu

from npu_emulation.counters import counted

STEP = ["aclnnAddRmsNorm", "aclnnDynamicQuantV2", "aclnnMatmul", "aclnnSwiGlu"]


@pytest.fixture(scope="module")
def operands() -> dict[str, torch.Tensor]:
    def new(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="npu", dtype=torch.bfloat16)

    return {"x": new(4, 64), "residual": new(4, 64), "gamma": new(64), "weight": new(64, 32)}


@pytest.fixture(params=["without numerics", "with numerics"])
def step(request, operands):
    """A fused step of four kernels, its buffers allocated; the counts are the same either way."""
    if request.param == "with numerics":
        request.getfixturevalue("numerics")

    def run() -> torch.Tensor:
        x, residual, gamma, weight = operands.values()
        y, _, _ = torch_npu.npu_add_rms_norm(x, residual, gamma, 1e-6)
        torch_npu.npu_dynamic_quant(y)
        return torch_npu.npu_swiglu(y @ weight)

    run()
    torch.npu.synchronize()
    return run


def test_a_fused_step_is_four_launches_and_no_wait(step):
    with counted() as counts:
        step()
    assert counts.calls == {"launches": 4}
    assert counts.launched == STEP


def test_item_is_one_copy_and_one_stream_synchronisation(step):
    with counted() as counts:
        step()[0, 0].item()
    assert counts.calls == {"launches": 4, "d2h": 1, "stream_syncs": 1}


def test_a_branch_on_a_tensor_costs_what_item_costs(step):
    result = step()
    with counted() as counts:
        bool(result.sum() > 0)
    assert counts.without_mallocs == {"launches": 2, "d2h": 1, "stream_syncs": 1}


def test_a_boolean_mask_synchronises_and_masked_fill_does_not(step):
    result = step()
    torch.npu.synchronize()
    with counted() as counts:
        result[result > 0]
    assert counts.without_mallocs == {"launches": 3, "stream_syncs": 1}
    with counted() as counts:
        result.masked_fill_(result > 0, 0.0)
    assert counts.without_mallocs == {"launches": 2}


def test_a_copy_to_pinned_memory_does_not_wait(step):
    result = step()
    buffer = torch.empty(result.shape, dtype=result.dtype).pin_memory()
    with counted() as counts:
        buffer.copy_(result, non_blocking=True)
    assert counts.calls == {"async_d2h": 1}


def test_a_copy_from_pinned_memory_does_not_wait_and_from_unpinned_memory_does(step):
    target, source = torch.empty(8, device="npu"), torch.zeros(8)
    pinned = source.pin_memory()
    with counted() as counts:
        target.copy_(pinned, non_blocking=True)
    assert counts.calls == {"async_h2d": 1}
    with counted() as counts:
        target.copy_(source, non_blocking=True)
    assert counts.calls == {"async_h2d": 1, "stream_syncs": 1}


def test_a_tensor_from_a_list_is_one_copy_and_one_synchronisation(step):
    with counted() as counts:
        torch.tensor([1, 2, 3], device="npu")
    assert counts.without_mallocs == {"h2d": 1, "stream_syncs": 1}


def test_events_between_streams_make_no_host_wait_and_synchronising_one_is_one(step):
    event, other = torch.npu.Event(), torch.npu.Stream()
    with counted() as counts:
        event.record()
        other.wait_event(event)
    assert counts.calls == {}
    with counted() as counts:
        event.synchronize()
    assert counts.calls == {"event_syncs": 1}


def test_a_graph_s_replay_is_one_launch(step):
    graph = torch.npu.NPUGraph()
    with counted() as captured, torch.npu.graph(graph):
        step()
    # torch_npu 2.10 fills two tensors as each capture begins (presumably the generator's seed and
    # offset), 2.13 does not.
    of_generator = 2 if torch.__version__.startswith("2.10.") else 0
    assert captured.launched == ["aclnnInplaceFillScalar"] * of_generator + STEP
    with counted() as counts:
        graph.replay()
    assert counts.calls == {"launches": 1, "graph_replays": 1}


def decode(lengths: list[int] | torch.Tensor) -> None:
    query = torch.empty(4, 1, 256, device="npu", dtype=torch.bfloat16)
    cache = torch.empty(8, 128, 128, device="npu", dtype=torch.bfloat16)
    table = torch.empty(4, 2, device="npu", dtype=torch.int32)
    torch_npu.npu_fused_infer_attention_score(
        query,
        cache,
        cache,
        block_table=table,
        actual_seq_lengths_kv=lengths,
        num_heads=2,
        num_key_value_heads=1,
        input_layout="BSH",
        block_size=128,
    )


def test_lengths_of_the_host_cost_no_wait_and_a_device_tensor_one_per_request():
    with counted() as counts:
        decode([5] * 4)
    assert (counts.stream_syncs, counts.d2h) == (0, 0)
    on_device = torch.tensor([5] * 4, device="npu")
    with counted() as counts:
        decode(on_device)
    assert (counts.stream_syncs, counts.d2h) == (4, 4)
