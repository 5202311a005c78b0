"""Prefill on an NPU is attention over each request's own pages: in one launch where rows of several
requests may stand one behind another, else in one a request, and never with a wait.

The oracle is float64, one row and one head after another.
"""

from __future__ import annotations

import pytest
import torch

from npu_emulation.counters import counted
from npu_emulation.goldens import attention as goldens
from sglang_ascend.ops import attention
from sglang_ascend.ops.attention import fused
from sglang_ascend.ops.npu import CallRefused, CheckedCalls

FUSED = "npu::npu_fused_infer_attention_score_v2"
BF16, FP16 = torch.bfloat16, torch.float16
HEADS, KV_HEADS, PAGE = 4, 2, 128
# A chunk behind a prefix, a whole prompt, one token, a prompt over three pages.
QUERY_LENS, KV_LENS = [5, 9, 1, 260], [150, 9, 129, 260]
TABLE = [[6, 2, 0], [4, 0, 0], [1, 8, 0], [3, 5, 7]]
# A weight and the result are rounded once each.
TOLERANCES = {BF16: {"rtol": 2**-7, "atol": 2**-7}, FP16: {"rtol": 2**-10, "atol": 2**-10}}


def operands(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    caches = [torch.randn(9 * PAGE, KV_HEADS, dim).to(dtype) for _ in range(2)]
    return torch.randn(sum(QUERY_LENS), HEADS, dim).to(dtype), *caches


def oracle(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor):
    """[rows, heads, dim] in float64."""
    dim, rows = query.shape[2], []
    of_requests = query.double().split(QUERY_LENS)
    for queries, pages, kv_len in zip(of_requests, TABLE, KV_LENS, strict=True):
        slots = [pages[i // PAGE] * PAGE + i % PAGE for i in range(kv_len)]
        keys, values = key_cache[slots].double(), value_cache[slots].double()
        for i, row in enumerate(queries):
            visible = kv_len - len(queries) + i + 1
            for head in range(HEADS):
                kv_head = head * KV_HEADS // HEADS
                scores = keys[:visible, kv_head] @ row[head] * dim**-0.5
                weights = (scores - scores.max()).exp()
                rows.append(weights / weights.sum() @ values[:visible, kv_head])
    return torch.stack(rows).view(query.shape)


def attend(host: tuple[torch.Tensor, ...], table: list[list[int]] = TABLE) -> torch.Tensor:
    on_npu = [tensor.to("npu") for tensor in (*host, torch.tensor(table))]
    with CheckedCalls() as checked, counted() as counts:
        result = attention.paged_gqa_ragged(
            *on_npu,
            KV_LENS,
            query_lens=QUERY_LENS,
            page_size=PAGE,
            scale=host[0].shape[2] ** -0.5,
        )
    assert counts.stream_syncs == counts.event_syncs == 0
    assert not checked.unknown
    return result.cpu()


@pytest.mark.parametrize(
    ("dim", "dtype", "num_launches"),
    [(128, BF16, 1), (192, BF16, 1), (64, BF16, 4), (128, FP16, 4), (256, FP16, 4)],
)
def test_rows_see_their_request_s_keys_up_to_themselves(numerics, dim, dtype, num_launches):
    host = operands(dim, dtype)
    found = attend(host)
    assert numerics.computed[FUSED] == num_launches
    torch.testing.assert_close(found.double(), oracle(*host), **TOLERANCES[dtype])


def another_request_s_pages(monkeypatch):
    return [TABLE[0], TABLE[3], TABLE[2], TABLE[1]]


def no_mask(monkeypatch):
    monkeypatch.setattr(goldens, "hidden", lambda *args: torch.zeros(args[3:], dtype=torch.bool))
    return TABLE


def rows_of_other_requests(monkeypatch):
    right = fused.accumulate
    monkeypatch.setattr(fused, "accumulate", lambda lens: right(sorted(lens)))
    return TABLE


MISTAKES = [another_request_s_pages, no_mask, rows_of_other_requests]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_call_is_seen(numerics, monkeypatch, mistake):
    host = operands(128, BF16)
    found = attend(host, mistake(monkeypatch))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.double(), oracle(*host), **TOLERANCES[BF16])


@pytest.mark.parametrize("sparse_mode", [2, 0])
def test_the_documentation_refuses_another_mask(numerics, monkeypatch, sparse_mode):
    monkeypatch.setattr(fused, "RIGHT_ALIGNED_CAUSAL", sparse_mode)
    with pytest.raises(CallRefused, match="TND has sparse mode 0 without a mask or mode 3"):
        attend(operands(128, BF16))
