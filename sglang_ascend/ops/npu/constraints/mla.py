"""Constraints of what precedes latent attention, and of the storage format of its weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_ascend.ops.npu.constraint import FRACTAL_NZ, Constraints, Rule, rule

HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
Q_LORA_RANK, KV_LORA_RANK, NOPE_DIM, ROPE_DIM = 1536, 512, 128, 64
# (line, quote, argument, its values)
MODES = (
    (9628, '支持"PA_BSND"、"PA_NZ"', "cache_mode", ("PA_BSND", "PA_NZ")),
    (9630, "0表示非量化，1表示weight_uq_qr量化，2表示", "weight_quant_mode", (0, 1, 2)),
    (9631, "0表示非量化，1表示per-tensor量化", "kv_cache_quant_mode", (0, 1, 2, 3)),
    (9632, "0表示非量化，1表示per-token-head量化", "query_quant_mode", (0, 1)),
    (9633, "0表示kv_cache和kr_cache分别存储", "ckvkr_repo_mode", (0, 1)),
    (9634, "0表示量化scale和数据分别存储", "quant_scale_repo_mode", (0, 1)),
)
NZ_WEIGHTS = ((9605, "weight_dq"), (9606, "weight_uq_qr"), (9608, "weight_dkv_kr"))


def is_on_npu(tensor: torch.Tensor) -> bool:
    """A Meta tensor stands for one of the NPU."""
    return tensor.device.type != "cpu"


def is_nz(tensor: torch.Tensor) -> bool:
    """Whether 16 x 16 blocks are stored one behind another; of a Meta tensor it is not known."""
    if tensor.device.type == "npu":
        return torch.ops.npu.get_npu_format(tensor) == FRACTAL_NZ
    return tensor.is_meta


def _values(line: int, quote: str, name: str, values: tuple[object, ...]) -> Rule:
    says = f"{name} is one of {', '.join(map(str, values))}"
    return rule(line, quote, says)(lambda call: getattr(call, name) in values)


def _is_nz(line: int, name: str) -> Rule:
    says = f"{name} is stored in the NZ format"
    return rule(line, "数据格式支持FRACTAL_NZ", says)(lambda call: is_nz(getattr(call, name)))


def _heads(call: SimpleNamespace) -> int:
    return call.weight_uk.shape[0]


CONSTRAINTS = (
    Constraints(
        "npu_format_cast",
        (
            rule(1279, "修改NPU张量的格式", "the input is a tensor of the NPU")(
                lambda c: is_on_npu(c.input)
            ),
        ),
    ),
    Constraints(
        "get_npu_format",
        (
            rule(1286, "torch_npu.get_npu_format(x)", "the input is a tensor of the NPU")(
                lambda c: is_on_npu(c.input)
            ),
        ),
    ),
    Constraints(
        "npu_mla_prolog_v3",
        (
            rule(9604, "格式为(T, He)和(B, S, He)", "tokens are [rows, hidden] or [b, s, hidden]")(
                lambda c: c.token_x.dim() in (2, 3)
            ),
            rule(9604, "dtype支持bfloat16和int8", "tokens are bfloat16 or int8")(
                lambda c: c.token_x.dtype in (torch.bfloat16, torch.int8)
            ),
            rule(9664, "取值范围：0~1048576", "there are at most 1048576 rows")(
                lambda c: c.token_x.dim() == 3 or len(c.token_x) <= 1048576
            ),
            rule(9650, "取值范围为0~65536", "there are at most 65536 requests")(
                lambda c: c.token_x.dim() == 2 or c.token_x.shape[0] <= 65536
            ),
            rule(9651, "取值范围为0~16", "a request has at most 16 rows")(
                lambda c: c.token_x.dim() == 2 or c.token_x.shape[1] <= 16
            ),
            rule(9652, "取值为7168、7680或6144", "the hidden size is 6144, 7168 or 7680")(
                lambda c: c.token_x.shape[-1] in (6144, 7168, 7680)
            ),
            rule(9607, "格式为(N, D, Hckv)，dtype支持bfloat16", "weight_uk is 3-D, in bfloat16")(
                lambda c: c.weight_uk.dim() == 3 and c.weight_uk.dtype == torch.bfloat16
            ),
            rule(9655, "取值范围为1、2、4、8、16、32、64、128", "heads are 1, 2, 4, .. or 128")(
                lambda c: _heads(c) in HEADS
            ),
            rule(9659, "取值为128", "a head has 128 columns beside those of its position")(
                lambda c: c.weight_uk.shape[1] == NOPE_DIM
            ),
            rule(9657, "取值为512", "a latent has 512 columns")(
                lambda c: c.weight_uk.shape[2] == KV_LORA_RANK
            ),
            rule(9654, "取值为1536", "weight_dq is [hidden, 1536]")(
                lambda c: c.weight_dq.shape == (c.token_x.shape[-1], Q_LORA_RANK)
            ),
            rule(9606, "格式为(Hcq, N*(D+Dr))", "weight_uq_qr is [1536, heads * (128 + 64)]")(
                lambda c: c.weight_uq_qr.shape == (Q_LORA_RANK, _heads(c) * (NOPE_DIM + ROPE_DIM))
            ),
            rule(9608, "格式为(He, Hckv+Dr)", "weight_dkv_kr is [hidden, 512 + 64]")(
                lambda c: c.weight_dkv_kr.shape == (c.token_x.shape[-1], KV_LORA_RANK + ROPE_DIM)
            ),
            rule(9609, "格式为(Hcq,)，dtype支持bfloat16", "rmsnorm_gamma_cq is bfloat16 [1536]")(
                lambda c: (
                    c.rmsnorm_gamma_cq.shape == (Q_LORA_RANK,)
                    and c.rmsnorm_gamma_cq.dtype == torch.bfloat16
                )
            ),
            rule(9610, "格式为(Hckv,)，dtype支持bfloat16", "rmsnorm_gamma_ckv is bfloat16 [512]")(
                lambda c: (
                    c.rmsnorm_gamma_ckv.shape == (KV_LORA_RANK,)
                    and c.rmsnorm_gamma_ckv.dtype == torch.bfloat16
                )
            ),
            rule(9667, "则rope_sin和rope_cos的shape为(T, Dr)", "a row has 64 sines and cosines")(
                lambda c: c.rope_sin.shape == c.rope_cos.shape == (*c.token_x.shape[:-1], ROPE_DIM)
            ),
            rule(9612, "dtype支持bfloat16", "sines and cosines are bfloat16")(
                lambda c: c.rope_sin.dtype == c.rope_cos.dtype == torch.bfloat16
            ),
            rule(
                9613, "格式为(BlockNum, BlockSize, Nkv, Hckv)", "kv_cache is [pages, size, 1, 512]"
            )(lambda c: c.kv_cache.dim() == 4 and c.kv_cache.shape[2:] == (1, KV_LORA_RANK)),
            rule(9614, "格式为(BlockNum, BlockSize, Nkv, Dr)", "kr_cache is [pages, size, 1, 64]")(
                lambda c: c.kr_cache.shape == (*c.kv_cache.shape[:2], 1, ROPE_DIM)
            ),
            rule(9663, "取值范围为16、128", "pages hold 16 or 128 tokens")(
                lambda c: c.kv_cache.shape[1] in (16, 128)
            ),
            rule(9613, "dtype支持bfloat16和int8", "caches are bfloat16 or int8")(
                lambda c: {c.kv_cache.dtype, c.kr_cache.dtype} <= {torch.bfloat16, torch.int8}
            ),
            rule(9615, "dtype支持int64", "slots are int64")(
                lambda c: c.cache_index is None or c.cache_index.dtype == torch.int64
            ),
            rule(9667, "cache_index的shape为(T,)", "there is a slot for each row")(
                lambda c: c.cache_index is None or c.cache_index.shape == c.token_x.shape[:-1]
            ),
            *(_values(*mode) for mode in MODES),
            *(_is_nz(*weight) for weight in NZ_WEIGHTS),
        ),
    ),
)
