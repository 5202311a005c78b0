"""Fused attention on the emulated NPU is softmax(scale q k^T + mask) v, against loops in float64.

Every layout, page form and mask that serving uses, called through the real torch_npu; mistakes put
into the definition are caught.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu

from npu_emulation.attention_requests import (
    BLOCK,
    HEADS,
    KV_HEADS,
    KV_LENGTHS,
    SCALE,
    WIDTH,
    Requests,
    attend,
    cumulative,
    oracle_row,
    triangle,
)
from npu_emulation.goldens import attention


def check_decode(layout: str, form: str) -> None:
    """One row per request, no mask."""
    requests = Requests.random([1] * len(KV_LENGTHS), KV_LENGTHS)
    wanted = torch.stack(requests.oracle(causal=False)[0])
    query = torch.stack(requests.queries)
    if layout == "BSH":
        query, wanted = query.flatten(2), wanted.flatten(2)
    elif layout == "BNSD":
        query, wanted = query.transpose(1, 2).contiguous(), wanted.transpose(1, 2)
    paged = requests.paged(form)
    result, _ = attend(
        query,
        input_layout=layout,
        block_size=BLOCK,
        actual_seq_lengths_kv=KV_LENGTHS,
        **paged,
    )
    torch.testing.assert_close(result, wanted)


def check_verify(rows: list[int], form: str = "BnBsH") -> None:
    """Several rows per request behind what is cached, causal; and the log-sum-exp."""
    requests = Requests.random(rows, KV_LENGTHS)
    wanted, wanted_lse = requests.oracle(causal=True)
    result, lse = attend(
        torch.cat(requests.queries),
        input_layout="TND",
        block_size=BLOCK,
        sparse_mode=3,
        atten_mask=triangle(),
        actual_seq_lengths=cumulative(rows),
        actual_seq_lengths_kv=KV_LENGTHS,
        softmax_lse_flag=True,
        **requests.paged(form),
    )
    torch.testing.assert_close(result, torch.cat(wanted))
    torch.testing.assert_close(lse, torch.cat(wanted_lse))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("form", ["BnBsH", "BnBsND", "BnNBsD"])
def test_decode_over_pages_attends_to_each_request_s_keys(numerics, layout, form):
    check_decode(layout, form)


def test_a_request_without_keys_attends_to_nothing(numerics):
    """As when a server captures its graphs."""
    requests = Requests.random([1, 1, 1], KV_LENGTHS)
    result, _ = attend(
        torch.stack(requests.queries),
        input_layout="BSND",
        block_size=BLOCK,
        actual_seq_lengths_kv=[0, *KV_LENGTHS[1:]],
        **requests.paged("BnBsH"),
    )
    wanted = requests.oracle(causal=False)[0]
    torch.testing.assert_close(result, torch.stack([torch.zeros_like(wanted[0]), *wanted[1:]]))


@pytest.mark.parametrize("rows", [[4, 4, 4], [1, 3, 2]])
@pytest.mark.parametrize("form", ["BnBsH", "BnNBsD"])
def test_verify_over_pages_is_causal_from_the_right(numerics, rows, form):
    check_verify(rows, form)


def test_a_prefill_without_pages_has_cumulative_lengths_on_both_sides(numerics):
    lengths = [3, 7]
    requests = Requests.random(lengths, lengths, value_width=8)
    result, _ = attend(
        torch.cat(requests.queries),
        key=torch.cat(requests.keys).to("npu"),
        value=torch.cat(requests.values).to("npu"),
        input_layout="TND",
        sparse_mode=3,
        atten_mask=triangle(),
        actual_seq_lengths=cumulative(lengths),
        actual_seq_lengths_kv=cumulative(lengths),
    )
    torch.testing.assert_close(result, torch.cat(requests.oracle(causal=True)[0]))


def test_a_mask_of_one_s_own_hides_what_it_marks(numerics):
    requests = Requests.random([6], [6])
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    result, lse = attend(
        requests.queries[0][None],
        key=requests.keys[0][None].to("npu"),
        value=requests.values[0][None].to("npu"),
        input_layout="BSND",
        atten_mask=mask.to("npu"),
        softmax_lse_flag=True,
    )
    wanted, wanted_lse = requests.oracle(causal=True)
    torch.testing.assert_close(result[0], wanted[0])
    torch.testing.assert_close(lse[0], wanted_lse[0].transpose(0, 1))


def check_mla(rows: list[int]) -> None:
    """Latent keys that are the values too, one head of them, and rotary operands beside them."""
    rope_width = 8
    latents = [torch.randn(length, 1, WIDTH) for length in KV_LENGTHS]
    ropes = [torch.randn(length, 1, rope_width) for length in KV_LENGTHS]
    queries = [torch.randn(count, HEADS, WIDTH + rope_width) for count in rows]
    joined = [torch.cat(pair, -1) for pair in zip(latents, ropes, strict=True)]
    wanted = []
    for query, keys, values in zip(queries, joined, latents, strict=True):
        for i in range(len(query)):
            visible = len(keys) - len(query) + i + 1
            for head in range(HEADS):
                row = oracle_row(query[i, head], keys[:, 0], values[:, 0], visible)[0]
                wanted.append(row.float())
    paged = Requests(queries, latents, ropes).paged("BnNBsD")
    flat = torch.cat(queries)
    result, _ = attend(
        flat[..., :WIDTH].contiguous(),
        key=paged["key"],
        value=paged["key"],
        query_rope=flat[..., WIDTH:].contiguous().to("npu"),
        key_rope=paged["value"],
        num_key_value_heads=1,
        input_layout="TND",
        block_size=BLOCK,
        block_table=paged["block_table"],
        sparse_mode=3,
        atten_mask=triangle(),
        actual_seq_lengths=cumulative(rows),
        actual_seq_lengths_kv=KV_LENGTHS,
    )
    torch.testing.assert_close(result, torch.stack(wanted).view_as(result))


def test_latent_attention_adds_the_rotary_scores(numerics):
    check_mla([4, 4, 4])


def test_atb_s_paged_attention_writes_the_rows_it_has_lengths_for(numerics):
    requests = Requests.random([1, 1, 1], KV_LENGTHS)
    paged = requests.paged("BnBsND")
    lengths = torch.tensor(KV_LENGTHS, dtype=torch.int32)
    out = torch.full((4, HEADS, WIDTH), 7.0, device="npu")
    torch_npu._npu_paged_attention(
        torch.cat([*requests.queries, requests.queries[0]]).to("npu"),
        paged["key"],
        paged["value"],
        KV_HEADS,
        HEADS,
        SCALE,
        paged["block_table"],
        lengths,
        out,
    )
    wanted = torch.cat(requests.oracle(causal=False)[0])
    torch.testing.assert_close(out[:3].cpu(), wanted)
    assert out[3].eq(7.0).all().item()
    assert numerics.not_counted == {"atb::_npu_paged_attention": 1}


def test_atb_s_latent_attention_takes_its_values_from_the_keys(numerics):
    requests = Requests.random([1, 1, 1], KV_LENGTHS)
    requests.values = [keys[..., :8] for keys in requests.keys]
    paged = requests.paged("BnBsND")
    out = torch.empty(3, HEADS, 8, device="npu")
    torch_npu._npu_paged_attention_mla(
        torch.cat(requests.queries).to("npu"),
        paged["key"],
        KV_HEADS,
        HEADS,
        SCALE,
        paged["block_table"],
        torch.tensor(KV_LENGTHS, dtype=torch.int32),
        8,
        out,
    )
    torch.testing.assert_close(out.cpu(), torch.cat(requests.oracle(causal=False)[0]))


def test_the_second_version_is_the_first_under_other_names(numerics):
    requests = Requests.random([2, 2, 2], KV_LENGTHS)
    paged = requests.paged("BnBsH")
    result, _ = torch_npu.npu_fused_infer_attention_score_v2(
        torch.cat(requests.queries).to("npu"),
        paged["key"],
        paged["value"],
        block_table=paged["block_table"],
        block_size=BLOCK,
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=SCALE,
        input_layout="TND",
        sparse_mode=3,
        atten_mask=triangle(),
        actual_seq_qlen=[2, 4, 6],
        actual_seq_kvlen=KV_LENGTHS,
    )
    torch.testing.assert_close(result.cpu(), torch.cat(requests.oracle(causal=True)[0]))


def test_a_causal_mask_of_the_wrong_sense_is_refused(numerics):
    requests = Requests.random([2, 2, 2], KV_LENGTHS)
    attend_wrongly = {
        "input_layout": "TND",
        "block_size": BLOCK,
        "sparse_mode": 3,
        "atten_mask": ~triangle(),
        "actual_seq_lengths": [2, 4, 6],
        "actual_seq_lengths_kv": KV_LENGTHS,
    }
    with pytest.raises(NotImplementedError, match="takes the upper triangle"):
        attend(torch.cat(requests.queries), **attend_wrongly, **requests.paged("BnBsH"))


def a_mask_one_further(sparse_mode, mask, request, num_rows, num_keys):
    return torch.ones(num_rows, num_keys, dtype=torch.bool).triu(num_keys - num_rows + 2)


def a_mask_from_the_left(sparse_mode, mask, request, num_rows, num_keys):
    return torch.ones(num_rows, num_keys, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("mistake", [a_mask_one_further, a_mask_from_the_left])
def test_a_wrong_causal_mask_is_caught(numerics, monkeypatch, mistake):
    monkeypatch.setattr(attention, "hidden", mistake)
    for check in (check_verify, check_mla):
        with pytest.raises(AssertionError):
            check([4, 4, 4])


def test_pages_of_another_request_are_caught(numerics, monkeypatch):
    rows_of = attention.Pages.rows
    swapped = {0: 1, 1: 0, 2: 2}

    def rows(self, cache, request, length, num_heads):
        return rows_of(self, cache, swapped[request], length, num_heads)

    monkeypatch.setattr(attention.Pages, "rows", rows)
    with pytest.raises(AssertionError):
        check_decode("BSND", "BnBsH")
