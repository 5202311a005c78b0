"""Where no body for the NPU takes a call, PyTorch's serves it there, through the attention that
torch_npu makes of torch's own.

The oracle is nested loops in float64 over each request's own keys, as in tests/ops.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ops.paged_batch import Batch, agrees

from npu_emulation.goldens import fusion_attention
from sglang_ascend.ops import attention
from sglang_ascend.ops.npu import CheckedCalls
from sglang_ascend.verify.operators.against_reference import to

BY_TORCH_NPU = "npu::npu_fusion_attention_v3"
# A chunk behind a prefix, a whole prompt, one token.
LENS = {"query_lens": [5, 9, 1], "kv_lens": [23, 9, 30]}


def on_npu(batch: Batch) -> torch.Tensor:
    sizes = {"query_lens": batch.query_lens, "page_size": batch.page_size, "scale": batch.scale}
    if hasattr(batch, "rank"):
        op, sizes["kv_lora_rank"] = attention.paged_mla_ragged, batch.rank
        operands = batch.query, batch.key_cache, batch.table
    else:
        op = attention.paged_gqa_ragged
        operands = batch.query, batch.key_cache, batch.value_cache, batch.table
    with CheckedCalls():
        return op(*to("npu", operands), batch.kv_lens, **sizes).cpu()


@pytest.mark.parametrize(
    ("dim", "dtype", "page_size"),
    [(64, torch.float32, 128), (72, torch.bfloat16, 128), (64, torch.bfloat16, 1)],
)
def test_grouped_heads_of_other_sizes_are_prefilled(numerics, dim, dtype, page_size):
    batch = Batch((4, 2, dim), **LENS, page_size=page_size, dtype=dtype)
    assert agrees(on_npu(batch), batch.expected())
    assert numerics.computed[BY_TORCH_NPU] == len(batch.kv_lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_prefilled(numerics, dtype):
    batch = Batch((4, 80, 32), **LENS, page_size=16, dtype=dtype, mla=True)
    assert agrees(on_npu(batch), batch.expected())
    assert numerics.computed[BY_TORCH_NPU] == len(batch.kv_lens)


def shows_what_the_mask_hides(monkeypatch):
    monkeypatch.setattr(fusion_attention, "DEFAULT_MASK", None)
    monkeypatch.setattr(fusion_attention, "ALL_MASK", None)
    monkeypatch.setattr(
        fusion_attention, "hidden", lambda *args: torch.zeros(args[3:], dtype=torch.bool)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_definition_that_shows_what_the_mask_hides_is_caught(numerics, monkeypatch, dtype):
    shows_what_the_mask_hides(monkeypatch)
    batch = Batch((4, 2, 64), **LENS, page_size=128, dtype=dtype)
    assert not agrees(on_npu(batch), batch.expected())


def test_heads_share_keys_by_groups_and_a_mask_may_differ_by_request(numerics):
    query, key = torch.randn(2, 6, 3, 32), torch.randn(2, 2, 7, 32)
    value, mask = torch.randn(2, 2, 7, 32), torch.rand(2, 1, 3, 7) < 0.7
    found = F.scaled_dot_product_attention(
        *(x.to("npu") for x in (query, key, value)), attn_mask=mask.to("npu"), enable_gqa=True
    )
    keys, values = (x.double().repeat_interleave(3, 1) for x in (key, value))
    scores = (query.double() @ keys.mT / 32**0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(found.cpu(), (scores.softmax(-1) @ values).float())
    assert numerics.computed[BY_TORCH_NPU] == 1
