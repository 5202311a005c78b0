"""Where no body for the NPU takes a call, the reference serves it there, through the attention that
torch_npu makes of torch's own.

Compared with the reference on the CPU, which tests/ops compares with loops in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from npu_emulation.body_calls import to
from npu_emulation.goldens import fusion_attention
from sglang_ascend.ops import attention
from sglang_ascend.ops.npu import CheckedCalls

BY_TORCH_NPU = "npu::npu_fusion_attention_v3"
# A chunk behind a prefix, a whole prompt, one token.
LENS = {"query_lens": [5, 9, 1], "scale": 0.25}
KV_LENS = [23, 9, 30]


def prefill(
    dim: int, dtype: torch.dtype, page_size: int, num_heads: int = 4, num_kv_heads: int = 2
) -> tuple[tuple, dict]:
    num_blocks = -(-max(KV_LENS) // page_size)
    pages = torch.randperm(3 * num_blocks + 1)[: 3 * num_blocks].view(3, -1)
    slots = (3 * num_blocks + 1) * page_size
    caches = [torch.randn(slots, num_kv_heads, dim).to(dtype) for _ in range(2)]
    query = torch.randn(sum(LENS["query_lens"]), num_heads, dim).to(dtype)
    return (query, *caches, pages, KV_LENS), LENS | {"page_size": page_size}


def check(op: Callable, args: tuple, kwargs: dict) -> None:
    with CheckedCalls():
        found = op(*to("npu", args), **kwargs).cpu()
    tolerance = 1e-5 if found.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, op(*args, **kwargs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dim", "dtype", "page_size"),
    [(64, torch.float32, 128), (72, torch.bfloat16, 128), (64, torch.bfloat16, 1)],
)
def test_grouped_heads_of_other_sizes_are_prefilled(numerics, dim, dtype, page_size):
    check(attention.paged_gqa_ragged, *prefill(dim, dtype, page_size))
    assert numerics.computed[BY_TORCH_NPU] == len(KV_LENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_prefilled(numerics, dtype):
    (query, latents, _, *rest), kwargs = prefill(80 + 32, dtype, 16, num_kv_heads=1)
    check(attention.paged_mla_ragged, (query, latents, *rest), kwargs | {"kv_lora_rank": 80})
    assert numerics.computed[BY_TORCH_NPU] == len(KV_LENS)


def shows_what_the_mask_hides(monkeypatch):
    monkeypatch.setattr(fusion_attention, "DEFAULT_MASK", None)
    monkeypatch.setattr(fusion_attention, "ALL_MASK", None)
    monkeypatch.setattr(
        fusion_attention, "hidden", lambda *args: torch.zeros(args[3:], dtype=torch.bool)
    )


def test_a_definition_that_shows_what_the_mask_hides_is_caught(numerics, monkeypatch):
    shows_what_the_mask_hides(monkeypatch)
    with pytest.raises(AssertionError):
        check(attention.paged_gqa_ragged, *prefill(64, torch.float32, 128))


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
