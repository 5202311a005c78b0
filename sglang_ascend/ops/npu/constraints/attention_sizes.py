"""Sizes that fused attention takes: heads, columns, pages and lengths. They follow the
constraints of its operands, on which their predicates rely."""

from __future__ import annotations

from sglang_ascend.ops.npu.constraints.attention_call import Row

SIZES: tuple[Row, ...] = (
    (
        (8220, 8777),
        "且key和value的shape需保证一致",
        "paged keys and values have one shape",
        lambda c: not c.is_paged or c.key.shape == c.value.shape,
    ),
    (
        (8220, 8777),
        "当query的input_layout为BSH、BSND时, kv cache排布只支持(blocknum, blocksize, H)一种格式",
        "BSH and BSND read pages of [size, heads * dim], not of [heads, size, dim]",
        lambda c: (
            not c.is_paged or c.is_latent or c.layout not in ("BSH", "BSND") or c.key.dim() != 4
        ),
    ),
    (
        (8220, 8777),
        "且KV_N*D超过65535时",
        "a token of such a page has at most 65535 columns",
        lambda c: not c.is_paged or c.key.dim() != 3 or c.key.shape[2] <= 65535,
    ),
    (
        (8280, 8817),
        "key、value输入类型为float16、bfloat16时需要16对齐",
        "pages hold a multiple of 16 tokens",
        lambda c: not c.is_paged or c.block_size % 16 == 0,
    ),
    (
        (8204, 8762),
        "支持N轴小于等于256, 支持D轴小于等于512",
        "there are at most 256 heads of at most 512 columns",
        lambda c: c.num_heads <= 256 and c.head_dim <= 512,
    ),
    (
        (8204, 8762),
        "input_layout为BSH或者BSND时, 要求N*D小于65535",
        "several rows a request in BSH or BSND have fewer than 65535 columns",
        lambda c: (
            c.is_latent
            or c.layout not in ("BSH", "BSND")
            or max(c.rows) == 1
            or c.num_heads * c.head_dim < 65535
        ),
    ),
    (
        (8210, 8768),
        "输入类型全为float16、bfloat16时, D轴需16对齐",
        "16 divides a head's columns",
        lambda c: max(c.rows) == 1 or c.head_dim % 16 == 0,
    ),
    (
        (8194, 0),
        "T小于等于65536",
        "TND has at most 65536 rows",
        lambda c: c.layout != "TND" or len(c.query) <= 65536,
    ),
    (
        (0, 8718),
        "T小于等于1M",
        "TND has at most 1048576 rows",
        lambda c: c.layout != "TND" or len(c.query) <= 1 << 20,
    ),
    (
        (0, 8738),
        "元素个数不大于4096",
        "TND that is not latent has at most 4096 requests",
        lambda c: c.layout != "TND" or c.is_latent or len(c.rows) <= 4096,
    ),
    # The documents say fewer rows than keys. A prompt's first chunk has as many, and SGLang's own
    # backend calls it so: what would be read wrongly is a row that sees no key.
    (
        (8199, 0),
        "要求每个batch单独的actual_seq_lengths < actual_seq_lengths_kv",
        "causal TND has no more rows than keys in a request",
        lambda c: c.has_no_blind_row,
    ),
    (
        (0, 8734),
        "要求每个batch单独的actual_seq_qlen<actual_seq_kvlen",
        "causal TND has no more rows than keys in a request",
        lambda c: c.has_no_blind_row,
    ),
)
