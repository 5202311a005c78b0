"""A hook puts a PyTorch body where SGLang has a device kernel: same arguments, same result.

Oracles are loops written from what the kernel's callers expect; none calls the replacement.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

CASES = {
    "one request": ([3], [2], [7]),
    "ragged": ([4, 0, 2], [0, 5, 1], [3, 9, 8]),
    "an empty range": ([1, 5, 0], [4, 6, 2], [9, 6, 3]),
    "nothing": ([2], [3], [3]),
}


def pool_inputs(rows, starts, ends, dtype=torch.int32):
    count = sum(end - start for start, end in zip(starts, ends, strict=True))
    return {
        "req_pool_indices": torch.tensor(rows),
        "req_to_token": torch.full((6, 12), -1, dtype=dtype),
        "start_offset": torch.tensor(starts, dtype=torch.int32),
        "end_offset": torch.tensor(ends, dtype=torch.int32),
        "out_cache_loc": torch.arange(100, 100 + count),
        "batch_size": len(rows),
    }


def assigned_by_loops(rows, starts, ends) -> list[list[int]]:
    table = [[-1] * 12 for _ in range(6)]
    slot = 100
    for row, start, end in zip(rows, starts, ends, strict=True):
        for column in range(start, end):
            table[row][column] = slot
            slot += 1
    return table


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("body", ["reference", "numba"])
def test_slots_are_written_where_a_loop_writes_them(case, body, monkeypatch):
    from sglang_ascend.ops import slots
    from sglang_ascend.plugin.cpu.replacements import assign_req_to_token_pool

    monkeypatch.setattr(slots, "assign_slots", slots.assign_slots.implementation(body))
    inputs = pool_inputs(*CASES[case])
    assign_req_to_token_pool(**inputs)
    assert inputs["req_to_token"].tolist() == assigned_by_loops(*CASES[case])


def test_a_writer_that_forgets_the_start_offset_is_caught(monkeypatch):
    """The control: the comparison above fails for a body with that mistake."""
    from sglang_ascend.ops import slots
    from sglang_ascend.plugin.cpu.replacements import assign_req_to_token_pool

    write = slots.assign_slots.implementation("reference")

    def forgetful(table, rows, starts, ends, new_slots):
        write(table, rows, torch.zeros_like(starts), ends - starts, new_slots)

    monkeypatch.setattr(slots, "assign_slots", forgetful)
    inputs = pool_inputs(*CASES["ragged"])
    assign_req_to_token_pool(**inputs)
    assert inputs["req_to_token"].tolist() != assigned_by_loops(*CASES["ragged"])


class TestChainRelay:
    """What a step leaves is what the next one of the same request finds, whoever came between."""

    @pytest.fixture
    def relay(self, loaded_plugins, monkeypatch):
        from sglang_ascend.plugin.mtp import chain_relay

        settings = SimpleNamespace(speculative_num_draft_tokens=4, speculative_num_steps=3)
        monkeypatch.setattr(chain_relay, "get_spec", lambda: settings)
        pool = SimpleNamespace(req_to_token=torch.zeros(9, 5))
        return chain_relay.ChainRelay("cpu", SimpleNamespace(is_dspark=lambda: False), pool)

    def payload(self, candidates, bonus=None):
        from sglang.srt.managers.overlap_utils import RelayPayload

        return RelayPayload(bonus_tokens=bonus, topk_index=candidates)

    def resolved(self, relay, rows):
        draft_input = SimpleNamespace(future_indices=torch.tensor(rows, dtype=torch.int64))
        draft_input.topk_index = None
        relay._resolve_spec_extras(SimpleNamespace(spec_info=draft_input))
        return draft_input.topk_index

    def test_each_request_finds_its_own_chain(self, relay):
        first = torch.arange(8).view(2, 4)
        relay.stash(torch.tensor([7, 3]), self.payload(first))
        relay.stash(torch.tensor([1]), self.payload(torch.full((1, 4), 50)))
        assert self.resolved(relay, [3, 1, 7]).tolist() == [[4, 5, 6, 7], [50] * 4, [0, 1, 2, 3]]

    def test_the_chain_is_a_copy(self, relay):
        """The next step's rows are written while this one still reads its own."""
        relay.stash(torch.tensor([2]), self.payload(torch.ones(1, 4, dtype=torch.int64)))
        found = self.resolved(relay, [2])
        relay.stash(torch.tensor([2]), self.payload(torch.zeros(1, 4, dtype=torch.int64)))
        assert found.tolist() == [[1, 1, 1, 1]]

    def test_core_gathers_the_last_emitted_token(self, relay):
        """As it does for the decode rows of a mixed chunk."""
        relay.stash(torch.tensor([5]), self.payload(torch.tensor([[9, 1, 2, 3]])))
        assert relay.output_tokens_buf[torch.tensor([5])].tolist() == [9]

    def test_a_token_alone_is_taken_too(self, relay):
        relay.stash(torch.tensor([4]), self.payload(None, bonus=torch.tensor([8])))
        assert self.resolved(relay, [4])[0, 0] == 8

    def test_an_idle_batch_and_a_batch_of_prefill_have_nothing_to_relay(self, relay):
        nothing = torch.empty(0, dtype=torch.int64)
        relay.stash(nothing, self.payload(nothing.view(0, 4)))
        assert self.resolved(relay, []) is None
        relay._resolve_spec_extras(SimpleNamespace(spec_info=None))
        assert not relay.candidates.any()


def configurator(calls: dict) -> SimpleNamespace:
    return SimpleNamespace(
        _build_mha_kv_pool=lambda **arguments: calls.update(arguments),
        _build_mla_kv_pool=lambda **arguments: calls.update(arguments),
    )


@pytest.mark.sglang
def test_both_kinds_of_pool_are_the_device_neutral_ones(loaded_plugins):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from sglang_ascend.plugin.cpu.pools import EmulationPools

    calls: dict = {}
    EmulationPools._build_ascend_mha_kv_pool(configurator(calls), max_total_num_tokens=64)
    assert issubclass(calls["mha_pool_class"], MHATokenToKVPool)
    assert calls["max_total_num_tokens"] == 64
    calls.clear()
    EmulationPools._build_ascend_mla_kv_pool(
        configurator(calls), max_total_num_tokens=32, is_dsa_model=False
    )
    assert issubclass(calls["mla_pool_class"], MLATokenToKVPool)
    assert calls["max_total_num_tokens"] == 32


def test_a_sparse_model_is_refused(loaded_plugins):
    from sglang_ascend.plugin.cpu.pools import EmulationPools

    with pytest.raises(ValueError, match="DeepSeek sparse attention is not served on CPU"):
        EmulationPools._build_ascend_mla_kv_pool(
            configurator({}), max_total_num_tokens=32, is_dsa_model=True
        )
