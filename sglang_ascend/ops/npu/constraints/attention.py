"""Constraints of fused attention, whose two versions differ in names and in a few limits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from sglang_ascend.ops.npu.constraint import (
    FLOATS,
    FLOATS_AND_FP32,
    Constraints,
    Rule,
    contiguous,
    rule,
)
from sglang_ascend.ops.npu.constraints.attention_call import FusedAttention, Row
from sglang_ascend.ops.npu.constraints.attention_sizes import SIZES

# The mask of sparse modes 2, 3 and 4 has one size, whatever the lengths.
COMPRESSED_MASK = (2048, 2048)
POWERS_TO_128 = (1, 2, 4, 8, 16, 32, 64, 128)
ATTENTION_UPDATE = "aclnnAttentionUpdate, CANN documentation"

ROWS: tuple[Row, ...] = (
    (
        (8065, 8589),
        "数据类型支持float16、bfloat16、int8",
        "the query is float16, bfloat16 or int8",
        lambda c: c.query.dtype in (*FLOATS, torch.int8),
    ),
    (
        (8065, 8589),
        "不支持非连续的Tensor",
        "query, key and value are contiguous",
        lambda c: contiguous(c.query, c.key, c.value, c.query_rope, c.key_rope),
    ),
    (
        (8064, 8588),
        "且满足D=H/N",
        "the heads divide the width of a BSH query",
        lambda c: c.layout != "BSH" or c.query.shape[-1] % c.num_heads == 0,
    ),
    (
        (8116, 8627),
        "比值不能大于64",
        "key heads divide the query's heads, at most 64 to one",
        lambda c: c.num_heads % c.num_kv_heads == 0 and c.num_heads // c.num_kv_heads <= 64,
    ),
    (
        (8083, 8610),
        "int类型数组",
        "lengths are host integers: of a device tensor each is waited for",
        lambda c: c.lens_are_known,
    ),
    (
        (8082, 8609),
        "input_layout为TND时, 该入参必须传入",
        "TND says the query lengths, as running sums, and the key lengths",
        lambda c: (
            c.layout != "TND"
            or (
                c.query_lens is not None
                and c.kv_lens is not None
                and c.lens_are_known
                and min(c.rows) >= 0
                and c.query_lens[-1] == len(c.query)
            )
        ),
    ),
    (
        (8091, 8611),
        "数据类型支持int32",
        "the block table is int32",
        lambda c: not c.is_paged or c.block_table.dtype == torch.int32,
    ),
    (
        (8222, 8779),
        "必须传入actual_seq",
        "a paged call says the key lengths",
        lambda c: not c.is_paged or c.kv_lens is not None,
    ),
    (
        (8223, 8780),
        "block_table必须为二维, 第一维长度需等于B",
        "the block table has a row for each request",
        lambda c: (
            not c.is_paged or (c.block_table.dim() == 2 and len(c.block_table) == len(c.rows))
        ),
    ),
    (
        (8223, 8780),
        "第二维长度不能小于maxBlockNumPerSeq",
        "the block table covers the longest request",
        lambda c: (
            not (c.is_paged and c.kv_lens and c.block_size)
            or c.block_table.shape[1] * c.block_size >= max(c.kv_lens)
        ),
    ),
    (
        (8285, 8822),
        "(blocknum, blocksize, H)",
        "block_size is the cache's",
        lambda c: not c.is_paged or c.block_size == c.block_of_cache,
    ),
    (
        (8219, 8776),
        "block_size最小为128, 最大为512, 且要求是128的倍数",
        "with several rows a request, pages hold 128, 256, 384 or 512 tokens (16 or 128 for MLA)",
        lambda c: (
            not c.is_paged
            or max(c.rows) == 1
            or c.is_latent
            or c.block_size in (128, 256, 384, 512)
        ),
    ),
    (
        (8182, 8703),
        "此时block_size支持16、128",
        "latent attention is paged, with 16 or 128 tokens a page",
        lambda c: not c.is_latent or (c.is_paged and c.block_size in (16, 128)),
    ),
    (
        (8171, 8693),
        "要求同时配置或同时不配置",
        "query_rope and key_rope come together",
        lambda c: (c.query_rope is None) == (c.key_rope is None),
    ),
    (
        (8176, 8699),
        "1-16",
        "latent attention takes 1 to 16 rows a request and 64 rope columns",
        lambda c: not c.is_latent or (max(c.rows) <= 16 and c.query_rope.shape[-1] == 64),
    ),
    (
        (0, 8699),
        "n为1/2/4/8/16/32/64/128",
        "latent attention takes a power of two of heads, at most 128",
        lambda c: not c.is_latent or c.num_heads in POWERS_TO_128,
    ),
    (
        (8176, 0),
        "N为32、64、128",
        "latent attention takes 32, 64 or 128 heads",
        lambda c: not c.is_latent or c.num_heads in (32, 64, 128),
    ),
    (
        (8174, 8697),
        "S等于1时",
        "latent attention of one row has sparse mode 0 and no mask, of several mode 3 with a mask",
        lambda c: (
            not c.is_latent
            or (c.sparse_mode, c.atten_mask is None)
            == ((0, True) if max(c.rows) == 1 else (3, False))
        ),
    ),
    (
        (8214, 8772),
        "S的值需要固定为2048",
        "sparse modes 2, 3 and 4 take the 2048 x 2048 mask",
        lambda c: (
            c.sparse_mode not in (2, 3, 4)
            or (c.atten_mask is not None and c.atten_mask.shape[-2:] == COMPRESSED_MASK)
        ),
    ),
    (
        (0, 8719),
        "sparse模式仅支持sparse=0且不传mask，或sparse=3且传入mask",
        "TND has sparse mode 0 without a mask or mode 3 with one",
        lambda c: (
            c.layout != "TND" or (c.sparse_mode, c.atten_mask is None) in ((0, True), (3, False))
        ),
    ),
    (
        (0, 8733),
        "数据类型仅支持BFLOAT16",
        "TND that is not latent is bfloat16",
        lambda c: c.layout != "TND" or c.head_dim == 512 or c.query.dtype == torch.bfloat16,
    ),
    (
        (0, 8730),
        "要求Q_D、K_D、V_D等于128",
        "TND that is not latent has heads of 128 or 192",
        lambda c: c.layout != "TND" or c.head_dim in (128, 192, 512),
    ),
)


def _rules(version: int, view: Callable[[SimpleNamespace], FusedAttention]) -> tuple[Rule, ...]:
    def applied(holds: Callable[[FusedAttention], bool]) -> Callable[[SimpleNamespace], bool]:
        return lambda call: holds(view(call))

    return tuple(
        Rule(says, lines[version], quote, applied(holds))
        for lines, quote, says, holds in (*ROWS, *SIZES)
        if lines[version]
    )


CONSTRAINTS = (
    Constraints("npu_fused_infer_attention_score", _rules(0, FusedAttention.of_first)),
    Constraints("npu_fused_infer_attention_score_v2", _rules(1, FusedAttention.of_second)),
    Constraints(
        "npu_attention_update",
        (
            rule(0, ATTENTION_UPDATE, "there are 1 to 16 parts")(
                lambda c: 1 <= len(c.lse) == len(c.local_out) <= 16
            ),
            rule(2755, "数据类型支持 FLOAT，格式", "log-sum-exps are float32, one a row and head")(
                lambda c: all(lse.dim() == 1 and lse.dtype == torch.float32 for lse in c.lse)
            ),
            rule(2756, "(batch * seqLen * headNum, head_dim)", "parts are [rows * heads, columns]")(
                lambda c: all(
                    part.dim() == 2 and part.shape[:1] == lse.shape
                    for part, lse in zip(c.local_out, c.lse, strict=True)
                )
            ),
            rule(2756, "数据类型支持 FLOAT，FLOAT16，BFLOAT16", "parts are floats")(
                lambda c: all(part.dtype in FLOATS_AND_FP32 for part in c.local_out)
            ),
            rule(0, ATTENTION_UPDATE, "8 divides a head's columns, at most 512")(
                lambda c: all(
                    8 <= part.shape[1] <= 512 and part.shape[1] % 8 == 0 for part in c.local_out
                )
            ),
        ),
    ),
)
