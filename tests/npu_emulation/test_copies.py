"""Asynchronous work is seen by those who waited for it and by nobody else: the step that forgets a
wait reads poison or old values, always. Small programs on the real torch_npu.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from npu_emulation.counters import counted, late_copies, num_pending, runtime
from sglang_ascend.env import TRUST_COPY_ORDER
from sglang_ascend.plugin.npu.order import to_device

WANTED = [1.0, 2.0, 3.0, 4.0]
POISON = torch.tensor([0xEE] * 4, dtype=torch.uint8).view(torch.float32).item()


def pinned(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def on_device(values: list[float]) -> torch.Tensor:
    """Values that are there: a copy that the host waits for."""
    return torch.tensor(values).to("npu")


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor == POISON).all())


@pytest.fixture
def arriving() -> torch.Tensor:
    """A pinned buffer into which the current stream copies WANTED."""
    buffer = pinned([0.0] * 4)
    buffer.copy_(on_device(WANTED), non_blocking=True)
    return buffer


def test_a_pinned_buffer_read_before_any_wait_is_poison(arriving):
    assert is_poison(arriving)


def test_it_has_the_values_after_its_stream_is_synchronised(arriving):
    torch.npu.current_stream().synchronize()
    assert arriving.tolist() == WANTED


def test_it_has_the_values_after_the_device_is_synchronised(arriving):
    torch.npu.synchronize()
    assert arriving.tolist() == WANTED


def test_it_has_the_values_after_an_event_recorded_behind_it_is_synchronised(arriving):
    event = torch.npu.Event()
    event.record()
    assert is_poison(arriving)
    event.synchronize()
    assert arriving.tolist() == WANTED


def test_an_event_recorded_before_the_copy_does_not_bring_it():
    buffer, source, event = pinned([0.0] * 4), on_device(WANTED), torch.npu.Event()
    event.record()
    buffer.copy_(source, non_blocking=True)
    event.synchronize()
    assert is_poison(buffer)


def test_another_stream_s_event_and_synchronisation_do_not_bring_it(arriving):
    other, event = torch.npu.Stream(), torch.npu.Event()
    event.record(other)
    event.synchronize()
    other.synchronize()
    assert is_poison(arriving)


def test_a_stream_that_waited_for_the_event_brings_it(arriving):
    other, event = torch.npu.Stream(), torch.npu.Event()
    event.record()
    other.wait_event(event)
    assert is_poison(arriving)
    other.synchronize()
    assert arriving.tolist() == WANTED


def test_polling_an_event_ends_and_brings_it(arriving):
    event = torch.npu.Event()
    event.record()
    assert not event.query()
    assert is_poison(arriving)
    while not event.query():
        pass
    assert arriving.tolist() == WANTED


def test_polling_a_stream_ends_and_brings_it(arriving):
    stream = torch.npu.current_stream()
    assert not stream.query()
    while not stream.query():
        pass
    assert arriving.tolist() == WANTED


def test_two_copies_land_one_by_one():
    source, first, second = on_device(WANTED), pinned([0.0] * 4), pinned([0.0] * 4)
    event = torch.npu.Event()
    first.copy_(source, non_blocking=True)
    event.record()
    second.copy_(source, non_blocking=True)
    event.synchronize()
    assert first.tolist() == WANTED and is_poison(second)
    torch.npu.synchronize()
    assert second.tolist() == WANTED


def test_a_source_overwritten_before_its_copy_ran_is_copied_as_overwritten():
    source = pinned(WANTED)
    device = source.to("npu", non_blocking=True)
    source.fill_(9.0)
    assert device.cpu().tolist() == [9.0] * 4


def test_a_source_overwritten_after_a_wait_was_copied_before():
    source, event = pinned(WANTED), torch.npu.Event()
    device = source.to("npu", non_blocking=True)
    event.record()
    event.synchronize()
    source.fill_(9.0)
    assert device.cpu().tolist() == WANTED


def test_a_copy_from_unpinned_memory_has_read_its_source_when_the_call_returns():
    source = torch.tensor(WANTED)
    device = source.to("npu", non_blocking=True)
    source.fill_(9.0)
    assert device.cpu().tolist() == WANTED


def uploading(stream: torch.npu.Stream) -> tuple[torch.Tensor, torch.npu.Event]:
    """A device buffer into which `stream` copies WANTED, and an event behind the copy."""
    device, event, source = torch.empty(4, device="npu"), torch.npu.Event(), pinned(WANTED)
    with torch.npu.stream(stream):
        device.copy_(source, non_blocking=True)
        event.record()
    return device, event


def test_a_kernel_sees_what_its_own_stream_copied_before(numerics):
    device, _ = uploading(torch.npu.current_stream())
    assert (device + 1).cpu().tolist() == [value + 1 for value in WANTED]


def test_a_kernel_of_another_stream_without_a_wait_sees_poison(numerics):
    device, _ = uploading(torch.npu.Stream())
    result = device * 1
    assert is_poison(result.cpu())
    assert num_pending() == 1


def test_a_kernel_of_another_stream_with_a_wait_sees_the_copy(numerics):
    device, event = uploading(torch.npu.Stream())
    torch.npu.current_stream().wait_event(event)
    assert (device + 1).cpu().tolist() == [value + 1 for value in WANTED]


def test_a_kernel_of_another_stream_without_a_wait_sees_what_was_there_before(numerics):
    device = on_device(WANTED)
    with torch.npu.stream(torch.npu.Stream()):
        device.mul_(10)
    assert device.cpu().tolist() == WANTED
    torch.npu.synchronize()
    assert device.cpu().tolist() == [10 * value for value in WANTED]


def test_later_kernels_do_not_bring_a_copy_to_the_host(numerics):
    source, buffer = on_device(WANTED), pinned([0.0] * 4)
    doubled = source * 2
    buffer.copy_(doubled, non_blocking=True)
    doubled.zero_()
    _ = doubled + 1
    assert is_poison(buffer)
    torch.npu.current_stream().synchronize()
    assert buffer.tolist() == [2 * value for value in WANTED]


def test_waits_pass_on_over_several_streams(numerics):
    first, second = torch.npu.Stream(), torch.npu.Stream()
    device, event = uploading(first)
    later = torch.npu.Event()
    with torch.npu.stream(second):
        second.wait_event(event)
        doubled = device * 2
        later.record()
    torch.npu.current_stream().wait_event(later)
    assert (doubled + 1).cpu().tolist() == [2 * value + 1 for value in WANTED]


def test_a_copy_that_casts_waits_like_any_other(numerics):
    source, buffer = on_device(WANTED), torch.zeros(4, dtype=torch.float64).pin_memory()
    buffer.copy_(source, non_blocking=True)
    assert buffer.tolist() != WANTED
    torch.npu.current_stream().synchronize()
    assert buffer.tolist() == WANTED


def test_a_copy_that_rearranges_gives_what_the_cpu_gives(numerics):
    rows = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    moved = rows.t().to("npu", torch.int64)
    assert torch.equal(moved.cpu(), rows.t().long())
    assert torch.equal(moved.t()[1:].cpu(), rows[1:].long())


def copied_and_read(monkeypatch, trusted: bool) -> list[float]:
    """What a kernel finds that is queued behind a pinned copy which lands late."""
    monkeypatch.setenv(TRUST_COPY_ORDER.name, "1" if trusted else "")
    with late_copies():
        read = to_device(pinned(WANTED), "npu") * 1
    return read.cpu().tolist()


def test_a_kernel_that_runs_before_a_copy_does_not_see_it(numerics, monkeypatch):
    assert copied_and_read(monkeypatch, trusted=True) != WANTED


def test_the_host_waits_for_a_copy_whose_order_is_not_trusted(numerics, monkeypatch):
    assert copied_and_read(monkeypatch, trusted=False) == WANTED


def test_it_waits_for_the_copy_and_for_nothing_that_runs(numerics, monkeypatch):
    monkeypatch.delenv(TRUST_COPY_ORDER.name, raising=False)
    running = on_device(WANTED) * 2
    pending, source = num_pending(), pinned(WANTED)
    with counted() as counts:
        device = to_device(source, "npu")
    assert counts.without_mallocs == {"async_h2d": 1, "event_syncs": 1}
    assert num_pending() == pending > 0
    assert (device + running).cpu().tolist() == [3 * value for value in WANTED]


@pytest.mark.parametrize("kept", [True, False])
def test_memory_of_a_copy_is_not_written_again_before_it_was_read(kept, numerics, monkeypatch):
    monkeypatch.delenv(TRUST_COPY_ORDER.name, raising=False)
    if not kept:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    first = to_device(pinned(WANTED), "npu")
    read = first * 1
    del first
    to_device(pinned([0.0] * 4), "npu")
    assert (read.cpu().tolist() == WANTED) == kept


@pytest.mark.parametrize("barrier", [True, False])
def test_what_the_scheduler_writes_waits_for_the_last_forward_s_reads(barrier, numerics):
    """SGLang's barrier, with a stream of the scheduler that runs as early as it may."""
    from sglang.srt.managers.scheduler import Scheduler

    shared, forward_stream, schedule_stream = on_device(WANTED), *(torch.npu.Stream() for _ in "fs")
    runtime.npu_emulation_run_ahead(schedule_stream.npu_stream)
    runner = SimpleNamespace(shared_read_done_event=None)
    scheduler = SimpleNamespace(
        _war_barrier_enabled=barrier,
        model_worker=SimpleNamespace(last_shared_read_runner=runner),
        schedule_stream=schedule_stream,
        forward_stream=forward_stream,
    )
    with torch.npu.stream(forward_stream):
        read = shared * 1
    Scheduler._apply_war_barrier(scheduler)
    with torch.npu.stream(schedule_stream):
        shared.mul_(10)
    forward_stream.synchronize()
    assert (read.cpu().tolist() == WANTED) == barrier
