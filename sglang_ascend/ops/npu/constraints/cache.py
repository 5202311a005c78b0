"""Constraints of what writes keys and values into the paged cache."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_ascend.ops.npu.constraint import Constraints, contiguous, rule

KV_RMSNORM_ROPE_CACHE = "torch_npu.npu_kv_rmsnorm_rope_cache, hiascend ptaoplist_002368"


def _is_plain(call: SimpleNamespace) -> bool:
    """[pages, size, heads, dim]"""
    return call.key_cache.shape[2:] == call.key.shape[-2:]


def _is_nz(call: SimpleNamespace) -> bool:
    """[pages, heads * dim / c, size, c], c columns of 32 bytes."""
    _, blocks, _, columns = call.key_cache.shape
    return (
        blocks * columns == call.key.shape[-2] * call.key.shape[-1]
        and columns * call.key.element_size() == 32
    )


CONSTRAINTS = (
    Constraints(
        "npu_scatter_pa_kv_cache",
        (
            rule(7030, "输入参数不支持非连续", "keys, values, caches and slots are contiguous")(
                lambda c: contiguous(c.key, c.value, c.key_cache, c.value_cache, c.slot_mapping)
            ),
            rule(7031, "数据类型必须一致", "keys, values and both caches have one dtype")(
                lambda c: c.key.dtype == c.value.dtype == c.key_cache.dtype == c.value_cache.dtype
            ),
            rule(7019, "数据类型支持int32和int64", "slots are int32 or int64")(
                lambda c: c.slot_mapping.dtype in (torch.int32, torch.int64)
            ),
            rule(7017, "只支持4维", "both caches have 4 dimensions")(
                lambda c: c.key_cache.dim() == c.value_cache.dim() == 4
            ),
            rule(7034, "前两维shape必须相同", "keys and values have the same tokens and heads")(
                lambda c: c.key.dim() != 3 or c.key.shape[:2] == c.value.shape[:2]
            ),
            rule(
                7023, "默认值为'PA_NZ'", "cache_mode is Norm for [pages, size, heads, dim], not NZ"
            )(lambda c: _is_nz(c) if c.cache_mode == "PA_NZ" else _is_plain(c)),
            rule(6994, "slotMapping:[batch * seq_len]", "there is a slot for each token")(
                lambda c: c.slot_mapping.shape == c.key.shape[:1]
            ),
        ),
    ),
    Constraints(
        "npu_scatter_nd_update_",
        (
            rule(6900, "indices至少是2维", "indices have two dimensions or more")(
                lambda c: c.indices.dim() >= 2 and c.indices.shape[-1] <= c.input.dim()
            ),
            rule(6889, "数据类型支持int32、int64", "indices are int32 or int64")(
                lambda c: c.indices.dtype in (torch.int32, torch.int64)
            ),
            rule(6890, "数据类型需要与input一致", "updates have the dtype of what they update")(
                lambda c: c.updates.dtype == c.input.dtype
            ),
        ),
    ),
    Constraints(
        "npu_kv_rmsnorm_rope_cache",
        (
            rule(0, KV_RMSNORM_ROPE_CACHE, "kv is [batch, 1, rows, 512 + 64]")(
                lambda c: c.kv.dim() == 4 and c.kv.shape[1] == 1 and c.kv.shape[-1] == 576
            ),
            rule(0, KV_RMSNORM_ROPE_CACHE, "gamma has the 512 latent columns")(
                lambda c: c.gamma.shape == (512,)
            ),
            rule(0, KV_RMSNORM_ROPE_CACHE, "cosines and sines are [batch, 1, rows, 64]")(
                lambda c: c.cos.shape == c.sin.shape == (*c.kv.shape[:3], 64)
            ),
            rule(0, KV_RMSNORM_ROPE_CACHE, "slots are int64")(
                lambda c: c.index.dtype == torch.int64
            ),
            rule(0, KV_RMSNORM_ROPE_CACHE, "the rope cache comes before the latent cache")(
                lambda c: c.k_cache.shape[-1] != 512 and c.ckv_cache.shape[-1] != 64
            ),
        ),
    ),
)
