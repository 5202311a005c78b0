"""Attention of prompts is what loops in float64 make of it: ATB's over pages, and a sum of parts.

Mistakes put into the definitions are caught.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu

from npu_emulation.attention_requests import HEADS, KV_HEADS, KV_LENGTHS, SCALE, Requests, attend
from npu_emulation.goldens import GOLDENS, prompts


def triangle(size: int = 128) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bfloat16).triu(1).to("npu")


def check_prompt(rows: list[int], mask: torch.Tensor | None = None) -> None:
    requests = Requests.random(rows, KV_LENGTHS)
    wanted = torch.cat(requests.oracle(causal=True)[0]).flatten(1)
    paged = requests.paged("BnBsND")
    out = torch.zeros_like(wanted, device="npu")
    torch_npu._npu_flash_attention_qlens(
        query=torch.cat(requests.queries).flatten(1).to("npu"),
        key_cache=paged["key"],
        value_cache=paged["value"],
        block_table=paged["block_table"],
        mask=triangle() if mask is None else mask,
        seq_len=torch.tensor(rows, dtype=torch.int32),
        context_lens=torch.tensor(KV_LENGTHS, dtype=torch.int32),
        num_kv_heads=KV_HEADS,
        num_heads=HEADS,
        scale_value=SCALE,
        out=out,
    )
    torch.testing.assert_close(out.cpu(), wanted)


@pytest.mark.parametrize("rows", [[5, 20, 2], [1, 1, 1]])
def test_atb_s_prompts_attend_to_what_is_cached_and_causally_to_their_own(numerics, rows):
    check_prompt(rows)
    assert numerics.not_counted == {"atb::_npu_flash_attention_qlens": 1}


def test_another_mask_for_atb_is_refused(numerics):
    with pytest.raises(prompts.UnsupportedArgumentError, match="upper triangle of 128"):
        check_prompt([5, 3, 2], mask=triangle(64))


def test_a_causal_mask_from_the_left_is_caught(numerics, monkeypatch):
    monkeypatch.setattr(prompts, "RIGHT_CAUSAL", 2)
    with pytest.raises(AssertionError):
        check_prompt([5, 3, 2])


def check_parts() -> None:
    """Keys in two parts, of which the first request's second is empty."""
    firsts, rows = [5, 100, 128], [2, 3, 1]
    whole = Requests.random(rows, KV_LENGTHS)
    wanted = torch.cat(whole.oracle(causal=False)[0])
    parts = []
    for start, ends in ((0, firsts), (None, KV_LENGTHS)):
        cuts = [
            slice(first if start is None else 0, end)
            for first, end in zip(firsts, ends, strict=True)
        ]
        keys = [key[cut] for key, cut in zip(whole.keys, cuts, strict=True)]
        values = [value[cut] for value, cut in zip(whole.values, cuts, strict=True)]
        parts.append(
            attend(
                torch.cat(whole.queries),
                key=torch.cat(keys).to("npu"),
                value=torch.cat(values).to("npu"),
                input_layout="TND",
                actual_seq_lengths=torch.tensor(rows).cumsum(0).tolist(),
                actual_seq_lengths_kv=torch.tensor([len(key) for key in keys]).cumsum(0).tolist(),
                softmax_lse_flag=True,
            )
        )
    empty = slice(0, rows[0])
    parts[1][0][empty], parts[1][1][empty] = 0.0, -math.inf
    result, _ = torch_npu.npu_attention_update(
        [lse.flatten().to("npu") for _, lse in parts],
        [output.flatten(0, 1).to("npu") for output, _ in parts],
        0,
    )
    torch.testing.assert_close(result.cpu().view(wanted.shape), wanted)


def test_two_attentions_over_parts_of_the_keys_become_the_one_over_all(numerics):
    check_parts()


def test_parts_of_equal_weight_are_caught(numerics, monkeypatch):
    monkeypatch.setitem(
        GOLDENS,
        "npu::npu_attention_update",
        lambda lse, local_out, update_type: (torch.stack(list(local_out)).mean(0), None),
    )
    with pytest.raises(AssertionError):
        check_parts()
