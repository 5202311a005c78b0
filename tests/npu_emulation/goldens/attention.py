"""Fused inference attention (FIA), both versions: softmax(scale * q k^T + mask) v of each request,
in float32, over dense or paged keys, with MLA's rotary operands and the log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from npu_emulation.goldens.registry import UnsupportedArgumentError, golden

LEFT_CAUSAL, RIGHT_CAUSAL = 2, 3
NO_BAND = 2**31 - 1  # pre_tokens and next_tokens that hide nothing
COMPRESSED_MASK = 2048  # sparse modes 2 and 3 are given the upper triangle of this size


@dataclass(frozen=True)
class Layout:
    """How a tensor's dimensions are arranged: BSH, BSND, BNSD or TND; and how many heads it has."""

    name: str
    num_heads: int
    num_kv_heads: int

    def requests(self, x: Tensor, num_heads: int, ends: Sequence[int] | None) -> list[Tensor]:
        """Each request's rows [S, N, D]; `ends` are TND's cumulative lengths."""
        if self.name == "TND":
            assert ends is not None
            return [x[start:end] for start, end in pairwise([0, *ends])]
        if self.name == "BSH":
            return list(x.view(*x.shape[:2], num_heads, -1))
        if self.name == "BSND":
            return list(x)
        if self.name == "BNSD":
            return list(x.transpose(1, 2))
        raise UnsupportedArgumentError(f"attention in layout {self.name} is not emulated.")

    def joined(self, rows: list[Tensor], num_rows: int) -> Tensor:
        """The requests' results in the query's layout; TND rows behind the last request are 0."""
        if self.name == "TND":
            result = rows[0].new_zeros(num_rows, *rows[0].shape[1:])
            written = torch.cat(rows)
            result[: written.shape[0]] = written
            return result
        batch = torch.stack(rows)
        if self.name == "BSH":
            return batch.flatten(2)
        return batch if self.name == "BSND" else batch.transpose(1, 2)


@dataclass(frozen=True)
class Pages:
    """Paged keys or values: [blocks, size, N * D], [blocks, size, N, D] or [blocks, N, size, D]."""

    table: Tensor  # [requests, blocks of a request]
    size: int

    def rows(self, cache: Tensor, request: int, length: int, num_heads: int) -> Tensor:
        """The first `length` rows [length, N, D] of a request."""
        num_blocks = -(-length // self.size)
        blocks = cache[self.table[request, :num_blocks].long()]
        if cache.dim() == 5:
            raise UnsupportedArgumentError("attention over pages in NZ format is not emulated.")
        if cache.dim() == 4 and cache.shape[1:3] == (num_heads, self.size) != (
            self.size,
            num_heads,
        ):
            blocks = blocks.transpose(1, 2)
        width = cache[0].numel() // (self.size * num_heads)
        return blocks.reshape(-1, num_heads, width)[:length]


def hidden(
    sparse_mode: int, mask: Tensor | None, request: int, num_rows: int, num_keys: int
) -> Tensor:
    """[rows, keys], True where a row does not attend to a key."""
    if sparse_mode == 0:
        if mask is None:
            return torch.zeros(num_rows, num_keys, dtype=torch.bool)
        if num_rows == 1 and mask.dim() == 2:  # [requests, keys]
            return mask[request, None, :num_keys].bool()
        rows = mask.reshape(-1, *mask.shape[-2:])
        return rows[min(request, len(rows) - 1), :num_rows, :num_keys].bool()
    if sparse_mode not in (LEFT_CAUSAL, RIGHT_CAUSAL):
        raise UnsupportedArgumentError(f"attention with sparse_mode={sparse_mode} is not emulated.")
    triangle = torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=torch.bool).triu(1)
    if mask is None or not torch.equal(mask.bool().view(mask.shape[-2:]), triangle):
        raise UnsupportedArgumentError(
            f"sparse_mode={sparse_mode} takes the upper triangle of {COMPRESSED_MASK} as its mask."
        )
    shift = num_keys - num_rows if sparse_mode == RIGHT_CAUSAL else 0
    return torch.ones(num_rows, num_keys, dtype=torch.bool).triu(shift + 1)


def attend(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """scores [N, S, L] and value [L, N, D] to rows [S, N, D] and log-sum-exp [S, N, 1].

    A row that attends to nothing is 0, its log-sum-exp infinite.
    """
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().nan_to_num(0.0)
    rows = torch.einsum("nsl,lnd->snd", weights, value)
    return rows, torch.where(lse == -math.inf, math.inf, lse).transpose(0, 1)


def kept_rows(
    tensor: Tensor,
    layout: Layout,
    pages: Pages | None,
    num_requests: int,
    lengths: Sequence[int] | None,
) -> list[Tensor]:
    """Each request's keys or values [L, N, D], of its length."""
    heads = layout.num_kv_heads
    if pages is not None:
        kept = spread(lengths, num_requests, pages.table.shape[1] * pages.size)
        return [pages.rows(tensor, request, length, heads) for request, length in enumerate(kept)]
    dense = layout.requests(tensor, heads, lengths)
    if layout.name == "TND":
        return dense
    kept = spread(lengths, num_requests, dense[0].shape[0])
    return [rows[:length] for rows, length in zip(dense, kept, strict=True)]


def spread(lengths: Sequence[int] | None, num_requests: int, default: int) -> list[int]:
    """A length for each request: one given for all, or none for the whole dimension."""
    if not lengths:
        return [default] * num_requests
    return list(lengths) * num_requests if len(lengths) == 1 else list(lengths)[:num_requests]


@golden("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    pre_tokens: int = NO_BAND,
    next_tokens: int = NO_BAND,
) -> tuple[Tensor, Tensor | None]:
    """(attention, log-sum-exp [B, N, S, 1] or [T, N, 1] float32, if asked for).

    In TND lengths are cumulative, but those of paged keys are each request's own. The bounds of a
    band count in no causal mode.
    """
    if sparse_mode == 0 and (pre_tokens, next_tokens) != (NO_BAND, NO_BAND):
        raise UnsupportedArgumentError("attention in a band of tokens is not emulated.")
    num_kv_heads = num_key_value_heads or num_heads
    layout = Layout(input_layout, num_heads, num_kv_heads)
    lengths = actual_seq_lengths_kv
    queries = layout.requests(query, num_heads, actual_seq_lengths)
    pages = None if block_table is None else Pages(block_table, block_size)
    keys, values = (kept_rows(x, layout, pages, len(queries), lengths) for x in (key, value))
    if query_rope is not None and key_rope is not None:
        # q k^T + q_rope k_rope^T, as the product of the joined vectors
        key_ropes = kept_rows(key_rope, layout, pages, len(queries), lengths)
        keys = [torch.cat(pair, -1) for pair in zip(keys, key_ropes, strict=True)]
        query_ropes = layout.requests(query_rope, num_heads, actual_seq_lengths)
        queries = [torch.cat(pair, -1) for pair in zip(queries, query_ropes, strict=True)]
    rows, lses = [], []
    for request, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        k, v = (x.float().repeat_interleave(num_heads // num_kv_heads, 1) for x in (k, v))
        masked = hidden(sparse_mode, atten_mask, request, q.shape[0], k.shape[0])
        scores = torch.einsum("snd,lnd->nsl", q.float(), k) * scale
        row, lse = attend(scores.masked_fill(masked, -math.inf), v)
        rows.append(row.to(query.dtype))
        lses.append(lse)
    attention = layout.joined(rows, query.shape[0])
    if not softmax_lse_flag:
        return attention, None
    if input_layout == "TND":
        return attention, layout.joined(lses, query.shape[0])
    return attention, torch.stack(lses).transpose(1, 2)


@golden("npu::npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    pre_tokens: int = NO_BAND,
    next_tokens: int = NO_BAND,
) -> tuple[Tensor, Tensor | None]:
    """The first version under other names."""
    return fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask,
        actual_seq_qlen,
        actual_seq_kvlen,
        block_table,
        query_rope,
        key_rope,
        num_heads=num_query_heads,
        scale=softmax_scale,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        sparse_mode=sparse_mode,
        block_size=block_size,
        softmax_lse_flag=return_softmax_lse,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
    )


@golden("atb::_npu_paged_attention")
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
) -> None:
    """Decode: query and out [requests, heads, D], pages [blocks, size, kv heads, D]."""
    num_rows = context_lens.numel()  # a graph's query and out may have more
    rows, _ = fused_infer_attention_score(
        query[:num_rows].unsqueeze(1),
        key_cache,
        value_cache,
        actual_seq_lengths_kv=context_lens.tolist(),
        block_table=block_table,
        num_heads=num_heads,
        scale=scale_value,
        input_layout="BSND",
        num_key_value_heads=num_kv_heads,
        block_size=key_cache.shape[1],
    )
    out[:num_rows] = rows.squeeze(1)


@golden("atb::_npu_paged_attention_mla")
def paged_attention_mla(
    query: Tensor,
    key_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    mla_vheadsize: int,
    out: Tensor,
) -> None:
    """The same with keys whose first mla_vheadsize elements are the values."""
    values = key_cache[..., :mla_vheadsize]
    heads = (num_kv_heads, num_heads, scale_value)
    paged_attention(query, key_cache, values, *heads, block_table, context_lens, out)
