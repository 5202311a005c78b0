"""A captured graph replays with the values that its buffers and lengths then have, at one launch.

Lengths of attention are host numbers, frozen in a capture: `NPUGraph.update` replaces them, and a
program that forgets to, or does it too early, computes with the wrong ones here as on a device.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch_npu

from npu_emulation.counters import counted

HEADS, WIDTH, BLOCK = 2, 16, 128


def captured(step) -> tuple[torch.npu.NPUGraph, torch.Tensor]:
    gc.collect()  # torch_npu loses a capture during which another graph is destroyed
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        result = step()
    return graph, result


def test_capturing_computes_nothing_and_replaying_does(numerics):
    x = torch.ones(4, device="npu")
    total = torch.zeros(4, device="npu")
    graph, _ = captured(lambda: total.add_(x))
    assert total.tolist() == [0.0] * 4
    for replays in (1, 2, 3):
        with counted() as counts:
            graph.replay()
        assert counts.calls == {"launches": 1, "graph_replays": 1}
        assert total.tolist() == [float(replays)] * 4


def test_a_replay_reads_its_inputs_when_it_runs_and_waits_for_what_was_before(numerics):
    x = torch.zeros(4, device="npu")
    graph, doubled = captured(lambda: x * 2)
    source = torch.tensor([5.0] * 4).pin_memory()
    x.copy_(source, non_blocking=True)
    graph.replay()
    after = doubled + 1
    x.fill_(100.0)
    assert after.tolist() == [11.0] * 4


def test_a_replay_on_another_stream_is_seen_by_who_waited_for_it(numerics):
    x = torch.ones(4, device="npu")
    graph, doubled = captured(lambda: x * 2)
    stream, event = torch.npu.Stream(), torch.npu.Event()
    graph.replay()
    torch.npu.synchronize()
    x.fill_(3.0)
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        graph.replay()
        event.record()
    assert (doubled + 0).tolist() == [2.0] * 4
    torch.npu.current_stream().wait_event(event)
    assert (doubled + 0).tolist() == [6.0] * 4


def test_a_copy_to_the_host_in_a_graph_is_poison_until_its_replay_was_waited_for(numerics):
    x = torch.ones(4, device="npu")
    buffer = torch.zeros(4).pin_memory()
    graph, _ = captured(lambda: buffer.copy_(x * 2, non_blocking=True))
    assert buffer.tolist() == [0.0] * 4
    graph.replay()
    assert buffer.tolist() != [2.0] * 4
    torch.npu.synchronize()
    assert buffer.tolist() == [2.0] * 4


def test_two_streams_captured_together_replay_together(numerics):
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()

    def step():
        main, ready, done = torch.npu.current_stream(), torch.npu.Event(), torch.npu.Event()
        doubled = x * 2
        ready.record()
        with torch.npu.stream(side):
            side.wait_event(ready)
            tripled = doubled + 1
            done.record()
        main.wait_event(done)
        return tripled * 10

    graph, result = captured(step)
    x.fill_(4.0)
    graph.replay()
    assert result.tolist() == [90.0] * 4
    with torch.npu.stream(side):
        assert (x + 1).tolist() == [5.0] * 4


def test_waiting_for_the_host_inside_a_capture_is_refused(numerics):
    x = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError):
        captured(lambda: (x * 2).sum().item())


class Attention:
    """Decode over one page per request, captured with lengths of 1."""

    def __init__(self) -> None:
        self.query = torch.randn(2, 1, HEADS, WIDTH)
        self.keys = torch.randn(2, BLOCK, HEADS, WIDTH)
        # The captured graph reads these at every replay: whoever captures keeps them.
        self.operands = {
            "query": self.query.to("npu"),
            "key": self.keys.flatten(2).to("npu"),
            "value": self.keys.flatten(2).to("npu"),
            "block_table": torch.tensor([[0], [1]], dtype=torch.int32, device="npu"),
        }
        settings = {
            "actual_seq_lengths_kv": [1, 1],
            "num_heads": HEADS,
            "num_key_value_heads": HEADS,
            "scale": 0.25,
            "input_layout": "BSND",
            "block_size": BLOCK,
        }
        self.graph, (self.result, _) = captured(
            lambda: torch_npu.npu_fused_infer_attention_score(**self.operands, **settings)
        )

    def step(self, lengths: list[int]) -> None:
        self.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        self.graph.replay()

    def wanted(self, lengths: list[int]) -> torch.Tensor:
        rows = []
        for query, keys, length in zip(self.query, self.keys, lengths, strict=True):
            keys = keys[:length].double()
            weights = torch.einsum("snd,lnd->nsl", query.double(), keys).mul(0.25).softmax(-1)
            rows.append(torch.einsum("nsl,lnd->snd", weights, keys).float())
        return torch.stack(rows)


def check_lengths(attention: Attention) -> None:
    """A step, its wait, the next: as a server that fences its updates."""
    for lengths in ([3, 50], [4, 51], [5, 128]):
        attention.step(lengths)
        torch.testing.assert_close(attention.result.cpu(), attention.wanted(lengths))


def test_updated_lengths_are_those_of_the_next_replay(numerics):
    check_lengths(Attention())


def test_an_update_in_a_thread_of_its_own_is_the_same(numerics):
    attention = Attention()
    lengths = [3, 50]
    update = [{"actual_seq_lengths_kv": lengths}]
    thread = threading.Thread(target=attention.graph.update, args=(update,))
    thread.start()
    attention.graph.replay()
    thread.join()
    torch.testing.assert_close(attention.result.cpu(), attention.wanted(lengths))


def test_stale_lengths_are_caught(numerics, monkeypatch):
    """The update re-runs the operators, with the lengths that they had."""
    update = torch.npu.NPUGraph.update
    monkeypatch.setattr(
        torch.npu.NPUGraph, "update", lambda self, cpu_update_input: update(self, [{}])
    )
    with pytest.raises(AssertionError):
        check_lengths(Attention())


def test_an_update_before_the_last_replay_was_waited_for_reaches_that_replay(numerics):
    """What the fence between steps is for: without it a step has the next one's lengths."""
    attention = Attention()
    attention.step([3, 50])
    first = attention.result + 0
    attention.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [4, 51]}])
    torch.testing.assert_close(first.cpu(), attention.wanted([4, 51]))
    attention.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [4, 51]}])
    attention.graph.replay()


def test_an_update_costs_a_launch_for_each_attention_and_no_wait(numerics):
    attention = Attention()
    with counted() as counts:
        attention.step([3, 50])
    assert (counts.launches, counts.graph_replays) == (2, 1)
    assert (counts.stream_syncs, counts.event_syncs, counts.device_syncs) == (0, 0, 0)


REPLAY_WITHOUT_UPDATE = """
from npu_emulation.numerics import Numerics
from npu_emulation.test_graphs import Attention
with Numerics():
    attention = Attention()
    attention.graph.replay()
    attention.result.cpu()
"""


def test_a_replay_whose_update_is_missing_stops_with_the_reason():
    process = subprocess.run(
        [sys.executable, "-c", REPLAY_WITHOUT_UPDATE],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode != 0
    assert "waits for an external event that nothing has recorded" in process.stderr
