"""The control parameters of one forward: built once, shared by every layer that runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ascend.ops import attention as ops


@dataclass(frozen=True)
class StepMetadata:
    """What the rows of one forward see.

    Uniform forwards (decode, verify, draft-extend) set ``query_len`` and keep lengths on the
    device; ragged ones (prefill) carry host lengths in ``ragged_query_lens``/``ragged_kv_lens``.
    """

    block_table: torch.Tensor  # int64 [batch, max_blocks]
    kv_lens: torch.Tensor  # int64 [batch], including this forward's rows
    page_size: int
    query_len: int | None = None
    ragged_query_lens: tuple[int, ...] = ()
    ragged_kv_lens: tuple[int, ...] = ()

    @property
    def is_uniform(self) -> bool:
        return self.query_len is not None

    def of_last_rows(self, last_rows: torch.Tensor) -> StepMetadata:
        """What these rows alone see: one of a request, its last where the forward is ragged.

        ``last_rows`` int64 [requests] are numbers of this forward's rows, in the requests' order; a
        uniform forward's need not be of every request. Does not synchronise.
        """
        table, kv_lens = self.block_table, self.kv_lens
        if self.query_len is not None:
            requests = last_rows // self.query_len
            rows_behind = self.query_len - 1 - last_rows % self.query_len
            table, kv_lens = table[requests], kv_lens[requests] - rows_behind
        return StepMetadata(table, kv_lens, self.page_size, query_len=1)


def slot_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    max_kv_len: int,
) -> torch.Tensor:
    """Slot of every position of every request, int64 [batch, max_kv_len] (a page-1 block table).

    Positions past a request's length repeat its first slot, so that a masked key is a finite
    number whatever the rest of the pool holds.
    """
    slots = req_to_token[req_pool_indices.long(), :max_kv_len].long()
    written = torch.arange(max_kv_len, device=slots.device) < kv_lens[:, None]
    return torch.where(written, slots, slots[:, :1])


def gqa_attention(
    metadata: StepMetadata,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[rows, heads, head_dim] -> same; shapes as in ``ops.attention.reference.paged_gqa``."""
    if metadata.is_uniform:
        return ops.paged_gqa(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.kv_lens,
            query_len=metadata.query_len,
            page_size=metadata.page_size,
            scale=scale,
        )
    return ops.paged_gqa_ragged(
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.ragged_kv_lens,
        query_lens=metadata.ragged_query_lens,
        page_size=metadata.page_size,
        scale=scale,
    )


def mla_attention(
    metadata: StepMetadata,
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    rope_cache: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, heads, kv_lora_rank + rope] -> [rows, heads, kv_lora_rank]; caches, and a query in
    two parts, as in ``ops.attention.reference.paged_mla``."""
    if metadata.is_uniform:
        return ops.paged_mla(
            query,
            latent_cache,
            metadata.block_table,
            metadata.kv_lens,
            query_len=metadata.query_len,
            page_size=metadata.page_size,
            scale=scale,
            kv_lora_rank=kv_lora_rank,
            rope_cache=rope_cache,
            query_rope=query_rope,
        )
    return ops.paged_mla_ragged(
        query,
        latent_cache,
        metadata.block_table,
        metadata.ragged_kv_lens,
        query_lens=metadata.ragged_query_lens,
        page_size=metadata.page_size,
        scale=scale,
        kv_lora_rank=kv_lora_rank,
        rope_cache=rope_cache,
        query_rope=query_rope,
    )
