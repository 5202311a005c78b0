"""One view of the calls of both versions of fused attention, and the form of a rule about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from sglang_ascend.ops.npu.constraint import host_integers


@dataclass(frozen=True)
class FusedAttention:
    """A call of either version, by the names of the second."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_rope: Any  # what follows may be None
    key_rope: Any
    atten_mask: Any
    query_lens: Any
    kv_lens: Any
    block_table: Any
    num_heads: int
    num_kv_heads: int
    layout: str
    sparse_mode: int
    block_size: int

    @classmethod
    def of_first(cls, call: SimpleNamespace) -> FusedAttention:
        return cls._of(call, call.actual_seq_lengths, call.actual_seq_lengths_kv, call.num_heads)

    @classmethod
    def of_second(cls, call: SimpleNamespace) -> FusedAttention:
        return cls._of(call, call.actual_seq_qlen, call.actual_seq_kvlen, call.num_query_heads)

    @classmethod
    def _of(cls, call: SimpleNamespace, query_lens, kv_lens, num_heads: int) -> FusedAttention:
        return cls(
            call.query,
            call.key,
            call.value,
            call.query_rope,
            call.key_rope,
            call.atten_mask,
            query_lens,
            kv_lens,
            call.block_table,
            num_heads,
            call.num_key_value_heads or num_heads,
            call.input_layout.split("_")[0],
            call.sparse_mode,
            call.block_size,
        )

    @property
    def is_paged(self) -> bool:
        return self.block_table is not None

    @property
    def lens_are_known(self) -> bool:
        return host_integers(self.query_lens) and host_integers(self.kv_lens)

    @property
    def rows(self) -> list[int]:
        """Query rows of each request; of TND the lengths are running sums."""
        if self.layout != "TND":
            return [self.query.shape[2 if self.layout == "BNSD" else 1]] * self.query.shape[0]
        ends = [0, *(self.query_lens or ())]
        return [after - before for before, after in pairwise(ends)]

    @property
    def head_dim(self) -> int:
        width = self.query.shape[-1]
        return width // self.num_heads if self.layout == "BSH" else width

    @property
    def block_of_cache(self) -> int:
        """Of [pages, size, width], [pages, kv_heads, size, dim] and NZ's [.., size, 16] alike."""
        return self.key.shape[-2]

    @property
    def has_no_blind_row(self) -> bool:
        """Paged TND: each request's rows, counted from its end, all see a key."""
        if self.layout != "TND" or not self.is_paged or self.sparse_mode != 3:
            return True
        return all(rows <= kv for rows, kv in zip(self.rows, self.kv_lens, strict=False))

    @property
    def is_latent(self) -> bool:
        return self.query_rope is not None and self.head_dim == 512


# (lines of the first and the second version, quote, what it says, predicate); no line, no rule.
# In their order: a predicate may rely on those before it.
Row = tuple[tuple[int, int], str, str, Callable[[FusedAttention], bool]]
