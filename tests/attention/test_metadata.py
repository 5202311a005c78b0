"""What a step's rows see: each position's slot, nothing of the pool besides, the right operator."""

import dataclasses

import pytest
import torch

from sglang_ascend.attention import metadata as metadata_module
from sglang_ascend.attention.metadata import (
    StepMetadata,
    gqa_attention,
    mla_attention,
    slot_table,
)
from sglang_ascend.ops.attention import paged_gqa

KV_LENS = [1, 7, 30, 12, 30, 2]


def shuffled_pool(kv_lens, num_rows=9, max_context_len=40):
    """(req_to_token, rows): shuffled slots; positions past a request hold stale slot numbers."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_rows * max_context_len, generator=generator)
    req_to_token = slots.view(num_rows, max_context_len).int()
    rows = torch.randperm(num_rows, generator=generator)[: len(kv_lens)]
    return req_to_token, rows


@pytest.mark.parametrize("query_lens", [(4, 4, 4), (1, 9, 4), (3,)], ids=str)
def test_a_request_s_last_rows_see_what_they_see_among_all_rows(query_lens):
    kv_lens = [12, 30, 7][: len(query_lens)]
    req_to_token, rows = shuffled_pool(kv_lens)
    lengths, generator = torch.tensor(kv_lens), torch.Generator().manual_seed(1)
    table = slot_table(req_to_token, rows, lengths, max(kv_lens))
    cache = torch.randn(req_to_token.numel(), 1, 8, generator=generator)
    query = torch.randn(sum(query_lens), 2, 8, generator=generator)
    if len(set(query_lens)) == 1:
        step = StepMetadata(table, lengths, 1, query_lens[0])
        # As many rows as a step accepts, which may not be all.
        last_rows = (torch.arange(len(query_lens)) * query_lens[0] + torch.tensor([2, 0, 3]))[:2]
    else:
        step = StepMetadata(table, lengths, 1, None, query_lens, tuple(kv_lens))
        last_rows = torch.tensor(query_lens).cumsum(0) - 1
    of_all = gqa_attention(step, query, cache, cache, 0.3)[last_rows]
    seen = step.of_last_rows(last_rows)
    alone = gqa_attention(seen, query[last_rows], cache, cache, 0.3)
    assert torch.allclose(alone, of_all, atol=1e-6)
    # The controls: one token too few, and in a step the rows before them.
    mistakes = [dataclasses.replace(seen, kv_lens=seen.kv_lens - 1)]
    if step.is_uniform:
        mistakes.append(step.of_last_rows(last_rows - 1))
    for mistake in mistakes:
        astray = gqa_attention(mistake, query[last_rows], cache, cache, 0.3)
        assert not torch.allclose(astray, of_all, atol=1e-6)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_slot_table_is_the_request_row_and_then_its_first_slot(index_dtype):
    req_to_token, rows = shuffled_pool(KV_LENS)
    kv_lens = torch.tensor(KV_LENS, dtype=index_dtype)
    table = slot_table(req_to_token, rows.to(index_dtype), kv_lens, max(KV_LENS))
    assert table.dtype == torch.int64
    for i, kv_len in enumerate(KV_LENS):
        row = req_to_token[rows[i]].tolist()
        assert table[i].tolist() == row[:kv_len] + [row[0]] * (max(KV_LENS) - kv_len)


@pytest.mark.parametrize("query_len", [1, 4])
def test_nothing_of_a_poisoned_pool_leaks_through_the_slot_table(query_len):
    """Every slot that is not the request's own is NaN, so one read too many shows everywhere."""
    kv_lens = [max(query_len, length) for length in KV_LENS]
    req_to_token, rows = shuffled_pool(kv_lens)
    generator = torch.Generator().manual_seed(1)
    clean = torch.randn(req_to_token.numel(), 2, 8, generator=generator)
    query = torch.randn(len(kv_lens) * query_len, 4, 8, generator=generator)
    lengths = torch.tensor(kv_lens)
    table = slot_table(req_to_token, rows, lengths, max(kv_lens))
    for i, kv_len in enumerate(kv_lens):
        own = req_to_token[rows[i], :kv_len].long()
        poisoned = torch.full_like(clean, torch.nan)
        poisoned[own] = clean[own]
        one = StepMetadata(table[i : i + 1], lengths[i : i + 1], 1, query_len)
        queries = query[i * query_len : (i + 1) * query_len]
        output = gqa_attention(one, queries, poisoned, poisoned, 0.3)
        assert not output.isnan().any()
        latent = poisoned[:, :1]
        assert not mla_attention(one, queries, latent, 0.3, kv_lora_rank=5).isnan().any()


def test_a_batch_reads_no_slot_outside_its_requests():
    req_to_token, rows = shuffled_pool(KV_LENS)
    own = torch.cat([req_to_token[rows[i], :n].long() for i, n in enumerate(KV_LENS)])
    cache = torch.full((req_to_token.numel(), 1, 8), torch.nan)
    cache[own] = 1.0
    lengths = torch.tensor(KV_LENS)
    table = slot_table(req_to_token, rows, lengths, max(KV_LENS))
    step = StepMetadata(table, lengths, 1, query_len=1)
    output = gqa_attention(step, torch.ones(len(KV_LENS), 2, 8), cache, cache, 1.0)
    assert torch.allclose(output, torch.ones_like(output))


def test_stale_slots_would_leak():
    """The control: the request's row as it stands names slots of others past its length."""
    req_to_token, rows = shuffled_pool(KV_LENS)
    own = torch.cat([req_to_token[rows[i], :n].long() for i, n in enumerate(KV_LENS)])
    cache = torch.full((req_to_token.numel(), 1, 8), torch.nan)
    cache[own] = 1.0
    stale = req_to_token[rows, : max(KV_LENS)].long()
    # PyTorch's body reads whole padded rows; another may stop at each length.
    output = paged_gqa.implementation("torch")(
        torch.ones(len(KV_LENS), 2, 8),
        cache,
        cache,
        stale,
        torch.tensor(KV_LENS),
        query_len=1,
        page_size=1,
        scale=1.0,
    )
    assert output.isnan().any()


UNIFORM = StepMetadata(
    block_table=torch.zeros(2, 3, dtype=torch.int64),
    kv_lens=torch.tensor([5, 6]),
    page_size=16,
    query_len=4,
)
RAGGED = dataclasses.replace(
    UNIFORM, query_len=None, ragged_query_lens=(2, 3), ragged_kv_lens=(5, 6)
)


@pytest.mark.parametrize(
    ("step", "suffix", "lengths"),
    [
        (UNIFORM, "", {"query_len": 4}),
        (RAGGED, "_ragged", {"query_lens": (2, 3)}),
    ],
    ids=["uniform", "ragged"],
)
def test_metadata_picks_the_operator_and_passes_everything_on(step, suffix, lengths, monkeypatch):
    calls = []
    for name in ("paged_gqa", "paged_gqa_ragged", "paged_mla", "paged_mla_ragged"):
        monkeypatch.setattr(
            metadata_module.ops,
            name,
            lambda *args, name=name, **kwargs: calls.append((name, args, kwargs)) or name,
        )
    query, keys, values, ropes, turned = (object() for _ in range(5))
    kv_lens = step.kv_lens if step.is_uniform else (5, 6)
    common = {"page_size": 16, "scale": 0.5, **lengths}

    assert gqa_attention(step, query, keys, values, 0.5) == f"paged_gqa{suffix}"
    assert calls.pop() == (
        f"paged_gqa{suffix}",
        (query, keys, values, step.block_table, kv_lens),
        common,
    )
    assert mla_attention(step, query, keys, 0.5, 80, ropes, turned) == f"paged_mla{suffix}"
    assert calls.pop() == (
        f"paged_mla{suffix}",
        (query, keys, step.block_table, kv_lens),
        common | {"kv_lora_rank": 80, "rope_cache": ropes, "query_rope": turned},
    )


def test_metadata_cannot_change_under_a_running_forward():
    with pytest.raises(dataclasses.FrozenInstanceError):
        UNIFORM.query_len = 1
