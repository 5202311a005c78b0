"""A hook puts a PyTorch body where SGLang has a device kernel: same arguments, same result.

Oracles are loops written from what the kernel's callers expect; none calls the replacement. A hook
that is not in place, or that another plugin overrides, is noticed.
"""

from __future__ import annotations

import inspect
import pkgutil
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
def test_slots_are_written_where_a_loop_writes_them(case):
    from sglang_ascend.plugin.replacements import assign_req_to_token_pool

    inputs = pool_inputs(*CASES[case])
    assign_req_to_token_pool(**inputs)
    assert inputs["req_to_token"].tolist() == assigned_by_loops(*CASES[case])


def test_a_writer_that_forgets_the_start_offset_is_caught():
    inputs = pool_inputs(*CASES["ragged"])
    rows, starts, ends = CASES["ragged"]
    wrong = [[-1] * 12 for _ in range(6)]
    slot = 100
    for row, start, end in zip(rows, starts, ends, strict=True):
        for column in range(end - start):
            wrong[row][column] = slot
            slot += 1
    from sglang_ascend.plugin.replacements import assign_req_to_token_pool

    assign_req_to_token_pool(**inputs)
    assert inputs["req_to_token"].tolist() != wrong


@pytest.mark.parametrize("has_hidden", [True, False])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_relay_is_gathered_row_by_row(has_hidden, index_dtype):
    from sglang_ascend.plugin.replacements import gather_spec_extras

    buffers = [torch.rand(9, 1), torch.randint(50, (9, 1)), torch.randint(50, (9,))]
    buffers.append(torch.rand(9, 4, dtype=torch.bfloat16) if has_hidden else None)
    indices = [7, 0, 7, 3]
    gathered = gather_spec_extras(torch.tensor(indices, dtype=index_dtype), *buffers)
    for got, buffer in zip(gathered, buffers, strict=True):
        if buffer is None:
            assert got is None
        else:
            assert torch.equal(got, torch.stack([buffer[index] for index in indices]))


def test_the_gathered_rows_are_copies():
    """The relay buffers are overwritten by the next step while this one still reads its rows."""
    from sglang_ascend.plugin.replacements import gather_spec_extras

    buffers = [
        torch.zeros(3, 1),
        torch.zeros(3, 1).long(),
        torch.zeros(3).long(),
        torch.zeros(3, 2),
    ]
    gathered = gather_spec_extras(torch.tensor([1]), *buffers)
    for buffer in buffers:
        buffer.fill_(9)
    assert all(int(rows.max()) == 0 for rows in gathered)


def model_with_head() -> SimpleNamespace:
    return SimpleNamespace(
        model=SimpleNamespace(embed_tokens=SimpleNamespace(weight=torch.zeros(2, 2))),
        lm_head=SimpleNamespace(weight=torch.zeros(2, 2)),
    )


def test_embedding_and_head_are_shared_not_copied(loaded_plugins):
    from sglang_ascend.plugin.replacements import set_embed_and_head

    model, embed, head = model_with_head(), torch.ones(2, 2), torch.full((2, 2), 2.0)
    set_embed_and_head(model, embed, head)
    assert model.model.embed_tokens.weight is embed
    assert model.lm_head.weight is head


def configurator(calls: dict) -> SimpleNamespace:
    return SimpleNamespace(
        _build_mha_kv_pool=lambda **arguments: calls.update(arguments),
        _build_mla_kv_pool=lambda **arguments: calls.update(arguments),
    )


@pytest.mark.sglang
def test_both_kinds_of_pool_are_the_device_neutral_ones(loaded_plugins):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from sglang_ascend.plugin import replacements

    calls: dict = {}
    replacements.build_mha_kv_pool(configurator(calls), max_total_num_tokens=64)
    assert issubclass(calls["mha_pool_class"], MHATokenToKVPool)
    assert calls["max_total_num_tokens"] == 64
    calls.clear()
    replacements.build_mla_kv_pool(configurator(calls), max_total_num_tokens=32, is_dsa_model=False)
    assert calls == {"max_total_num_tokens": 32, "mla_pool_class": MLATokenToKVPool}


def test_a_sparse_model_is_refused(loaded_plugins):
    from sglang_ascend.plugin.replacements import build_mla_kv_pool

    with pytest.raises(ValueError, match="DeepSeek sparse attention is not served on CPU"):
        build_mla_kv_pool(configurator({}), max_total_num_tokens=32, is_dsa_model=True)


@pytest.mark.sglang
class TestHooksInThisProcess:
    """SGLang is loaded, hooks applied: what its modules now call, and what we notice."""

    @pytest.fixture(autouse=True)
    def plugins(self, loaded_plugins):
        pass

    def test_every_row_of_the_ledger_is_in_place_and_says_why(self):
        from sglang_ascend.plugin.hooks import active_hooks, missing_hooks

        assert missing_hooks() == []
        for hook in active_hooks():
            assert hook.why and hook.delete_when and hook.upstream.startswith("https://")

    def test_the_replacement_takes_the_arguments_of_what_it_replaces(self):
        from sglang.srt.plugins.hook_registry import HookType

        from sglang_ascend.plugin.hooks import active_hooks

        for hook in active_hooks():
            original = inspect.unwrap(pkgutil.resolve_name(hook.target))
            assert original.__module__.startswith("sglang.")
            expected = list(inspect.signature(original).parameters)
            taken = list(inspect.signature(hook.replacement).parameters)
            if hook.kind in (HookType.AROUND, HookType.AFTER):
                taken = taken[1:]  # the function that it wraps, or its result, comes first
            assert taken in (expected, ["args", "kwargs"]), hook.target

    def test_modules_that_imported_the_name_before_call_the_replacement(self):
        from sglang.srt.managers import overlap_utils

        rows = overlap_utils.gather_spec_extras(
            torch.tensor([1]), *(torch.arange(3.0)[:, None] for _ in range(3)), None
        )
        assert rows[0].item() == 1.0

    def test_a_hook_that_sglang_failed_to_apply_is_missing(self, monkeypatch):
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_ascend.plugin.errors import StartupRefused
        from sglang_ascend.plugin.hooks import active_hooks, missing_hooks, require_hooks

        lost = active_hooks()[0]
        monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {lost.target})
        assert missing_hooks() == [lost]
        with pytest.raises(StartupRefused, match=lost.target):
            require_hooks()

    def test_a_hook_that_another_plugin_overrides_is_missing(self, monkeypatch):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from sglang_ascend.plugin.hooks import CPU_HOOKS, missing_hooks

        lost = CPU_HOOKS[0]
        theirs = (HookType.REPLACE, lambda *arguments: None, None)
        hooks = {**HookRegistry._hooks, lost.target: [*HookRegistry._hooks[lost.target], theirs]}
        monkeypatch.setattr(HookRegistry, "_hooks", hooks)
        assert missing_hooks() == [lost]
