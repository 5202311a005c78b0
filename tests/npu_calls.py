"""For each operator of torch_npu a call as its documentation has it, and changes that break it.

A change names arguments and their new values; beside it stands the rule that it breaks.
"""

from __future__ import annotations

from typing import Any

import torch

BF16, FP32, INT8, INT32 = torch.bfloat16, torch.float32, torch.int8, torch.int32
Changes = list[tuple[str, dict[str, Any]]]


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fused_attention(lens: str, kv_lens: str, heads: str) -> dict[str, dict[str, Any]]:
    """Decode of 2 requests, verify of 4 rows each, prefill of one, latent decode and verify."""
    paged = {"block_table": empty(2, 3, dtype=INT32), "block_size": 128, kv_lens: [129, 300]}
    cache, latent = empty(9, 128, 256), empty(9, 1, 128, 512)
    mask = empty(2048, 2048, dtype=torch.bool)
    decode = {"query": empty(2, 1, 1024), "key": cache, "value": cache, **paged}
    verify = {
        "query": empty(8, 8, 128),
        "input_layout": "TND",
        "sparse_mode": 3,
        "atten_mask": mask,
        lens: [4, 8],
    }
    prefill = {
        "query": empty(1, 200, 8, 64),
        "key": empty(9, 128, 128),
        "value": empty(9, 128, 128),
        "block_table": empty(1, 3, dtype=INT32),
        lens: [200],
        kv_lens: [300],
        "input_layout": "BSND",
    }
    mla = {
        "query": empty(2, 1, 32, 512),
        "query_rope": empty(2, 1, 32, 64),
        "key": latent,
        "value": latent,
        "key_rope": empty(9, 1, 128, 64),
        "input_layout": "BSND",
        heads: 32,
        "num_key_value_heads": 1,
    }
    mla_verify = {
        "query": empty(2, 4, 32, 512),
        "query_rope": empty(2, 4, 32, 64),
        "sparse_mode": 3,
        "atten_mask": mask,
    }
    decode |= {heads: 8, "num_key_value_heads": 2}
    return {
        "decode": decode,
        "verify": decode | verify,
        "prefill": decode | verify | prefill,
        "latent decode": decode | mla,
        "latent verify": decode | mla | mla_verify,
    }


def attention_changes(kv_lens: str, heads: str) -> dict[str, Changes]:
    """Changes that break either version."""
    transposed = empty(9, 256, 128).transpose(1, 2)
    split_heads, wide = empty(9, 2, 128, 128), empty(9, 128, 65536)
    eight_key_heads = {"num_key_value_heads": 8}
    return {
        "decode": [
            ("the query is float16", {"query": empty(2, 1, 1024, dtype=FP32)}),
            ("contiguous", {"key": transposed}),
            ("the heads divide", {heads: 10, "num_key_value_heads": 1}),
            ("key heads divide", {"num_key_value_heads": 3}),
            (
                "key heads divide",
                {"query": empty(2, 1, 1024), heads: 128, "num_key_value_heads": 1},
            ),
            ("host integers", {kv_lens: empty(2, dtype=torch.int64)}),
            ("block table is int32", {"block_table": empty(2, 3, dtype=FP32)}),
            ("says the key lengths", {kv_lens: None}),
            ("a row for each request", {"block_table": empty(3, 3, dtype=INT32)}),
            ("covers the longest", {kv_lens: [129, 385]}),
            ("block_size is the cache's", {"block_size": 256}),
            ("come together", {"key_rope": empty(9, 1, 128, 64)}),
            ("have one shape", {"value": empty(9, 128, 128)}),
            ("not of [heads, size, dim]", {"key": split_heads, "value": split_heads}),
            ("at most 65535 columns", {"key": wide, "value": wide, "num_key_value_heads": 8}),
            (
                "a multiple of 16",
                {"key": empty(9, 120, 256), "value": empty(9, 120, 256), "block_size": 120},
            ),
            ("at most 256 heads", {"query": empty(2, 1, 264 * 16), heads: 264} | eight_key_heads),
            ("of at most 512", {"query": empty(2, 1, 8 * 1024)}),
        ],
        "prefill": [
            ("fewer than 65535", {"query": empty(1, 200, 256, 256), heads: 256} | eight_key_heads),
            ("16 divides", {"query": empty(1, 200, 8, 72)}),
        ],
        "verify": [
            ("no more rows than keys", {kv_lens: [129, 3]}),
            ("as running sums", {"actual_seq_lengths": [4, 7], "actual_seq_qlen": [4, 7]}),
            ("as running sums", {"actual_seq_lengths": None, "actual_seq_qlen": None}),
            (
                "pages hold 128",
                {"key": empty(9, 64, 256), "value": empty(9, 64, 256), "block_size": 64}
                | {kv_lens: [129, 190]},
            ),
            ("2048 x 2048", {"atten_mask": empty(4, 300, dtype=torch.bool)}),
            ("2048 x 2048", {"atten_mask": None}),
        ],
        "latent decode": [
            (
                "latent attention is paged",
                {"key": empty(9, 1, 32, 512), "block_size": 32, kv_lens: [40, 90]},
            ),
            ("64 rope columns", {"query_rope": empty(2, 1, 32, 32)}),
            ("mode 0 and no mask", {"sparse_mode": 1}),
        ],
        "latent verify": [
            ("1 to 16 rows", {"query": empty(2, 17, 32, 512), "query_rope": empty(2, 17, 32, 64)}),
            ("of several mode 3", {"sparse_mode": 0, "atten_mask": None}),
        ],
    }


def mla_prolog(*rows: int) -> dict[str, Any]:
    """With 8 heads, of rows one behind another or of requests."""
    return {
        "token_x": empty(*rows, 7168),
        "weight_dq": empty(7168, 1536),
        "weight_uq_qr": empty(1536, 8 * 192),
        "weight_uk": empty(8, 128, 512),
        "weight_dkv_kr": empty(7168, 576),
        "rmsnorm_gamma_cq": empty(1536),
        "rmsnorm_gamma_ckv": empty(512),
        "rope_sin": empty(*rows, 64),
        "rope_cos": empty(*rows, 64),
        "kv_cache": empty(9, 128, 1, 512),
        "kr_cache": empty(9, 128, 1, 64),
        "cache_index": empty(*rows, dtype=torch.int64),
    }


OF_FIRST = {
    "latent decode": [("32, 64 or 128 heads", {"num_heads": 16})],
    "verify": [
        ("at most 65536 rows", {"query": empty(65540, 8, 128), "actual_seq_lengths": [4, 65540]})
    ],
}
OF_SECOND = {
    "verify": [
        ("mode 0 without", {"sparse_mode": 4}),
        (
            "at most 1048576 rows",
            {"query": empty(1048580, 8, 128), "actual_seq_qlen": [4, 1048580]},
        ),
        (
            "at most 4096 requests",
            {
                "query": empty(4097, 8, 128),
                "actual_seq_qlen": list(range(1, 4098)),
                "actual_seq_kvlen": [300] * 4097,
                "block_table": empty(4097, 3, dtype=INT32),
            },
        ),
        ("is bfloat16", {"query": empty(8, 8, 128, dtype=torch.float16)}),
        ("128 or 192", {"query": empty(8, 8, 64)}),
    ],
    "latent decode": [("power of two of heads", {"num_query_heads": 24})],
}

GOOD: dict[str, dict[str, dict[str, Any]]] = {
    "npu_fused_infer_attention_score": fused_attention(
        "actual_seq_lengths", "actual_seq_lengths_kv", "num_heads"
    ),
    "npu_fused_infer_attention_score_v2": fused_attention(
        "actual_seq_qlen", "actual_seq_kvlen", "num_query_heads"
    ),
    "npu_attention_update": {
        "": {
            "lse": [empty(32, dtype=FP32)] * 2,
            "local_out": [empty(32, 128)] * 2,
            "update_type": 0,
        }
    },
    "npu_rms_norm": {"": {"input": empty(4, 96), "gamma": empty(96)}},
    "npu_add_rms_norm": {"": {"x1": empty(4, 96), "x2": empty(4, 96), "gamma": empty(96)}},
    "npu_rotary_mul": {
        "": {"input": empty(1, 4, 3, 64), "r1": empty(1, 4, 1, 64), "r2": empty(1, 4, 1, 64)}
    },
    "npu_mrope": {
        "one row": {
            "positions": empty(4, dtype=torch.int64),
            "query": empty(4, 512),
            "key": empty(4, 128),
            "cos_sin_cache": empty(99, 64),
            "head_size": 64,
            "mrope_section": [0, 0, 0],
        },
        "three rows": {
            "positions": empty(3, 4, dtype=torch.int64),
            "query": empty(4, 512),
            "key": empty(4, 128),
            "cos_sin_cache": empty(99, 128),
            "head_size": 128,
            "mrope_section": [16, 24, 24],
        },
    },
    "npu_interleave_rope": {
        "": {"x": empty(4, 8, 1, 64), "cos": empty(4, 1, 1, 64), "sin": empty(4, 1, 1, 64)}
    },
    "npu_swiglu": {"": {"input": empty(4, 96)}},
    "npu_scatter_pa_kv_cache": {
        "plain": {
            "key": empty(4, 2, 128),
            "value": empty(4, 2, 128),
            "key_cache": empty(9, 128, 2, 128),
            "value_cache": empty(9, 128, 2, 128),
            "slot_mapping": empty(4, dtype=INT32),
            "cache_mode": "Norm",
        },
        "NZ": {
            "key": empty(4, 2, 128),
            "value": empty(4, 2, 128),
            "key_cache": empty(9, 16, 128, 16),
            "value_cache": empty(9, 16, 128, 16),
            "slot_mapping": empty(4, dtype=INT32),
        },
    },
    "npu_scatter_nd_update_": {
        "": {
            "input": empty(99, 2, 64),
            "indices": empty(4, 1, dtype=INT32),
            "updates": empty(4, 2, 64),
        }
    },
    "npu_kv_rmsnorm_rope_cache": {
        "": {
            "kv": empty(4, 1, 1, 576),
            "gamma": empty(512),
            "cos": empty(4, 1, 1, 64),
            "sin": empty(4, 1, 1, 64),
            "index": empty(4, dtype=torch.int64),
            "k_cache": empty(9, 128, 1, 64),
            "ckv_cache": empty(9, 128, 1, 512),
        }
    },
    "npu_format_cast": {"": {"input": empty(64, 96), "acl_format": 29}},
    "get_npu_format": {"": {"input": empty(64, 96)}},
    "npu_mla_prolog_v3": {"rows": mla_prolog(4), "requests": mla_prolog(2, 3)},
    "npu_moe_gating_top_k": {
        "": {"x": empty(4, 256), "k": 8, "bias": empty(256), "k_group": 4, "group_count": 8}
    },
    "npu_moe_gating_top_k_softmax": {"": {"x": empty(4, 64), "k": 6}},
    "npu_moe_init_routing_v2": {
        "": {
            "x": empty(4, 96),
            "expert_idx": empty(4, 6, dtype=INT32),
            "expert_num": 64,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "active_expert_range": [0, 64],
        }
    },
    "npu_moe_finalize_routing": {
        "": {
            "expanded_permuted_rows": empty(24, 96),
            "skip1": None,
            "skip2": None,
            "bias": None,
            "scales": empty(4, 6),
            "expanded_src_to_dst_row": empty(24, dtype=INT32),
            "export_for_source_row": None,
        }
    },
    "npu_quant_matmul": {
        "": {
            "x1": empty(4, 96, dtype=INT8),
            "x2": empty(96, 64, dtype=INT8),
            "scale": empty(64, dtype=FP32),
            "pertoken_scale": empty(4, dtype=FP32),
        }
    },
    "npu_weight_quant_batchmatmul": {
        "": {
            "x": empty(4, 96),
            "weight": empty(96, 64, dtype=INT8),
            "antiquant_scale": empty(64),
        }
    },
    "npu_transpose_batchmatmul": {
        "": {
            "input": empty(4, 8, 512),
            "weight": empty(8, 512, 128),
            "perm_x1": [1, 0, 2],
            "perm_x2": [0, 1, 2],
            "perm_y": [1, 0, 2],
        }
    },
    "npu_grouped_matmul": {
        "": {
            "x": [empty(24, 96)],
            "weight": [empty(8, 96, 64)],
            "split_item": 2,
            "group_type": 0,
            "group_list": empty(8, dtype=torch.int64),
        },
        "int8": {
            "x": [empty(24, 96, dtype=INT8)],
            "weight": [empty(8, 96, 64, dtype=INT8)],
            "scale": [empty(8, 64)],
            "per_token_scale": [empty(24, dtype=FP32)],
            "split_item": 2,
            "group_type": 0,
            "group_list": empty(8, dtype=torch.int64),
            "output_dtype": BF16,
        },
    },
    "npu_dynamic_quant": {"": {"input": empty(4, 96)}},
    "npu_quantize": {
        "": {
            "input": empty(4, 96),
            "scales": empty(1, dtype=FP32),
            "zero_points": empty(1, dtype=FP32),
            "dtype": torch.qint8,
            "axis": -1,
            "div_mode": False,
        }
    },
    "npu_convert_weight_to_int4pack": {"": {"weight": empty(96, 64, dtype=INT32)}},
    "npu_top_k_top_p": {
        "": {"logits": empty(4, 99), "p": empty(4), "k": empty(4, dtype=INT32)},
        "p alone": {"logits": empty(4, 99), "p": empty(4)},
    },
}


def joined(first: dict[str, Changes], second: dict[str, Changes]) -> dict[str, Changes]:
    return {kind: first.get(kind, []) + second.get(kind, []) for kind in first | second}


WRONG: dict[str, dict[str, Changes]] = {
    "npu_fused_infer_attention_score": joined(
        attention_changes("actual_seq_lengths_kv", "num_heads"), OF_FIRST
    ),
    "npu_fused_infer_attention_score_v2": joined(
        attention_changes("actual_seq_kvlen", "num_query_heads"), OF_SECOND
    ),
    "npu_attention_update": {
        "": [
            ("1 to 16 parts", {"lse": [empty(32, dtype=FP32)]}),
            ("log-sum-exps are", {"lse": [empty(32)] * 2}),
            ("parts are [rows", {"local_out": [empty(4, 8, 128)] * 2}),
            ("parts are floats", {"local_out": [empty(32, 128, dtype=INT8)] * 2}),
            ("8 divides", {"local_out": [empty(32, 1024)] * 2}),
        ]
    },
    "npu_rms_norm": {
        "": [
            ("input is a float", {"input": empty(4, 96, dtype=INT8)}),
            ("gamma has the dtype", {"gamma": empty(96, dtype=FP32)}),
            ("gamma has the width", {"gamma": empty(64)}),
        ]
    },
    "npu_add_rms_norm": {
        "": [
            ("both summands", {"x2": empty(4, 64)}),
            ("gamma has the width", {"gamma": empty(64)}),
        ]
    },
    "npu_rotary_mul": {
        "": [
            ("input has 4", {"input": empty(4, 3, 64)}),
            ("cosines and sines", {"r1": empty(4, 64)}),
            ("half or interleave", {"rotary_mode": "neox"}),
            ("even and below 896", {"input": empty(1, 4, 3, 63)}),
        ]
    },
    "npu_mrope": {
        "one row": [
            ("positions are", {"positions": empty(4, dtype=FP32)}),
            ("two dimensions", {"query": empty(4, 8, 64)}),
            ("one dtype", {"cos_sin_cache": empty(99, 64, dtype=FP32)}),
            ("heads of head_size columns", {"key": empty(4, 100)}),
            ("32 divides head_size", {"head_size": 16}),
            ("32 divides the rotated", {"cos_sin_cache": empty(99, 48)}),
            ("has the rotated columns", {"cos_sin_cache": empty(99, 96)}),
            ("half or interleave", {"rotary_mode": "neox"}),
        ],
        "three rows": [("half the rotated columns", {"mrope_section": [16, 24, 20]})],
    },
    "npu_interleave_rope": {
        "": [
            ("the input is", {"x": empty(4, 8, 1, 32)}),
            ("cosines and sines", {"cos": empty(4, 8, 1, 64)}),
        ]
    },
    "npu_swiglu": {
        "": [
            ("float tensor", {"input": empty(4, 96, dtype=INT8)}),
            ("two equal halves", {"input": empty(4, 95)}),
        ]
    },
    "npu_scatter_pa_kv_cache": {
        "plain": [
            ("contiguous", {"key": empty(2, 4, 128).transpose(0, 1)}),
            ("one dtype", {"value": empty(4, 2, 128, dtype=FP32)}),
            ("slots are int32", {"slot_mapping": empty(4, dtype=FP32)}),
            ("both caches have 4", {"key_cache": empty(1152, 2, 128)}),
            ("same tokens and heads", {"value": empty(4, 1, 128)}),
            ("cache_mode is Norm", {"cache_mode": "PA_NZ"}),
            ("a slot for each token", {"slot_mapping": empty(5, dtype=INT32)}),
        ],
        "NZ": [("cache_mode is Norm", {"cache_mode": "Norm"})],
    },
    "npu_scatter_nd_update_": {
        "": [
            ("two dimensions or more", {"indices": empty(4, dtype=INT32)}),
            ("indices are int32", {"indices": empty(4, 1)}),
            ("dtype of what they update", {"updates": empty(4, 2, 64, dtype=FP32)}),
        ]
    },
    "npu_kv_rmsnorm_rope_cache": {
        "": [
            ("kv is", {"kv": empty(4, 1, 1, 80)}),
            ("gamma has", {"gamma": empty(576)}),
            ("cosines and sines", {"cos": empty(4, 1, 1, 32)}),
            ("slots are int64", {"index": empty(4, dtype=INT32)}),
            (
                "before the latent",
                {"k_cache": empty(9, 128, 1, 512), "ckv_cache": empty(9, 128, 1, 64)},
            ),
        ]
    },
    "npu_format_cast": {"": [("tensor of the NPU", {"input": torch.empty(64, 96)})]},
    "get_npu_format": {"": [("tensor of the NPU", {"input": torch.empty(64, 96)})]},
    "npu_mla_prolog_v3": {
        "rows": [
            ("tokens are [rows", {"token_x": empty(7168)}),
            ("tokens are bfloat16", {"token_x": empty(4, 7168, dtype=FP32)}),
            ("at most 1048576 rows", {"token_x": empty(1048577, 7168)}),
            ("the hidden size", {"token_x": empty(4, 4096)}),
            ("weight_uk is 3-D", {"weight_uk": empty(8, 128, 512, dtype=FP32)}),
            ("heads are", {"weight_uk": empty(6, 128, 512)}),
            ("128 columns beside", {"weight_uk": empty(8, 192, 512)}),
            ("a latent has", {"weight_uk": empty(8, 128, 256)}),
            ("weight_dq is [hidden", {"weight_dq": empty(1536, 7168)}),
            ("weight_uq_qr is [1536", {"weight_uq_qr": empty(1536, 8 * 128)}),
            ("weight_dkv_kr is [hidden", {"weight_dkv_kr": empty(7168, 512)}),
            ("rmsnorm_gamma_cq is", {"rmsnorm_gamma_cq": empty(512)}),
            ("rmsnorm_gamma_ckv is", {"rmsnorm_gamma_ckv": empty(512, dtype=FP32)}),
            ("64 sines", {"rope_sin": empty(4, 32)}),
            ("sines and cosines are bfloat16", {"rope_cos": empty(4, 64, dtype=FP32)}),
            ("kv_cache is", {"kv_cache": empty(9 * 128, 512)}),
            ("kr_cache is", {"kr_cache": empty(9, 128, 1, 512)}),
            ("16 or 128", {"kv_cache": empty(9, 64, 1, 512), "kr_cache": empty(9, 64, 1, 64)}),
            ("caches are", {"kv_cache": empty(9, 128, 1, 512, dtype=FP32)}),
            ("slots are int64", {"cache_index": empty(4, dtype=INT32)}),
            ("a slot for each row", {"cache_index": empty(5, dtype=torch.int64)}),
            ("cache_mode is", {"cache_mode": "PA_BNSD"}),
            ("weight_quant_mode is", {"weight_quant_mode": 3}),
            ("kv_cache_quant_mode is", {"kv_cache_quant_mode": 4}),
            ("query_quant_mode is", {"query_quant_mode": 2}),
            ("ckvkr_repo_mode is", {"ckvkr_repo_mode": 2}),
            ("quant_scale_repo_mode is", {"quant_scale_repo_mode": 2}),
            ("weight_dq is stored", {"weight_dq": torch.empty(7168, 1536, dtype=BF16)}),
            ("weight_uq_qr is stored", {"weight_uq_qr": torch.empty(1536, 1536, dtype=BF16)}),
            ("weight_dkv_kr is stored", {"weight_dkv_kr": torch.empty(7168, 576, dtype=BF16)}),
        ],
        "requests": [
            ("at most 65536 requests", {"token_x": empty(65537, 3, 7168)}),
            ("at most 16 rows", {"token_x": empty(2, 17, 7168)}),
        ],
    },
    "npu_moe_gating_top_k": {
        "": [
            ("scores are", {"x": empty(2, 4, 256)}),
            ("at most 2048", {"x": empty(4, 2056), "bias": None}),
            ("k fits", {"k": 129}),
            ("bias is", {"bias": empty(256, dtype=FP32)}),
            ("3 experts or more", {"group_count": 128, "k_group": 64}),
            ("renorm is 0", {"renorm": 1}),
        ]
    },
    "npu_moe_gating_top_k_softmax": {
        "": [
            ("scores are floats", {"x": empty(4, 64, dtype=INT8)}),
            ("at most 1024", {"k": 65}),
        ]
    },
    "npu_moe_init_routing_v2": {
        "": [
            ("rows are", {"x": empty(1, 4, 96)}),
            ("expert ids are int32", {"expert_idx": empty(4, 6, dtype=torch.int64)}),
            ("no row is dropped", {"drop_pad_mode": 1}),
            ("1 or 2", {"expert_tokens_num_type": 0}),
            ("is set", {"expert_tokens_num_flag": False}),
            ("-1 or 1", {"quant_mode": 0}),
            ("among all", {"active_expert_range": [0, 65]}),
        ]
    },
    "npu_moe_finalize_routing": {
        "": [
            ("is int32", {"expanded_src_to_dst_row": empty(24, dtype=torch.int64)}),
            ("the experts' results are", {"expanded_permuted_rows": empty(4, 6, 96)}),
            ("skip1 is not without", {"skip1": empty(4, 96)}),
            ("scales have", {"scales": empty(4, 6, dtype=FP32)}),
        ]
    },
    "npu_quant_matmul": {
        "": [
            ("x1 is int8", {"x1": empty(4, 96), "x2": empty(96, 64)}),
            ("dtype of x1", {"x2": empty(96, 64)}),
            ("one value, or one", {"scale": empty(96, dtype=FP32)}),
            ("scale is float32", {"scale": empty(64, dtype=torch.float16)}),
            ("one value a row", {"pertoken_scale": empty(64, dtype=FP32)}),
            (
                "at most 65535",
                {"x2": empty(96, 65536, dtype=INT8), "scale": empty(65536, dtype=FP32)},
            ),
        ]
    },
    "npu_weight_quant_batchmatmul": {
        "": [
            (
                "at most 65535",
                {"weight": empty(96, 65536, dtype=INT8), "antiquant_scale": empty(65536)},
            ),
            ("x is [m, k]", {"weight": empty(64, 96, dtype=INT8)}),
            ("dtype of x", {"antiquant_scale": empty(64, dtype=FP32)}),
            ("shape of the scale", {"antiquant_offset": empty(1)}),
            ("multiple of 32", {"antiquant_group_size": 96}),
        ]
    },
    "npu_transpose_batchmatmul": {
        "": [
            ("three dimensions", {"input": empty(8, 512)}),
            (
                "operands are floats",
                {"input": empty(4, 8, 512, dtype=INT8), "weight": empty(8, 512, 128, dtype=INT8)},
            ),
            ("operands have one dtype", {"weight": empty(8, 512, 128, dtype=FP32)}),
            ("only the first operand is permuted", {"perm_y": [0, 1, 2]}),
            ("[batch, k, n]", {"weight": empty(8, 256, 128)}),
            ("below 65536", {"weight": empty(8, 512, 65536)}),
            ("k is at most", {"input": empty(4, 128, 512), "weight": empty(128, 512, 128)}),
            ("no bias", {"bias": empty(128)}),
        ]
    },
    "npu_grouped_matmul": {
        "": [
            ("share k", {"weight": [empty(8, 64, 96)]}),
            ("at most 128", {"x": [empty(2, 96)] * 129}),
            ("when the result is one", {"x": [empty(2, 12, 96)]}),
            ("0 or 1", {"group_list_type": 2}),
        ],
        "int8": [("bfloat16 scales for", {"scale": [empty(8, 64, dtype=FP32)]})],
    },
    "npu_dynamic_quant": {
        "": [
            ("float16 or bfloat16", {"input": empty(4, 96, dtype=FP32)}),
            ("two dimensions", {"input": empty(96)}),
        ]
    },
    "npu_quantize": {
        "": [
            ("a float tensor", {"input": empty(4, 96, dtype=INT8)}),
            ("as the scales", {"zero_points": empty(1)}),
            ("qint8 or quint4x2", {"dtype": torch.int32}),
        ]
    },
    "npu_convert_weight_to_int4pack": {
        "": [
            ("[k, n] int32", {"weight": empty(96, 64)}),
            ("8 divides", {"weight": empty(96, 63, dtype=INT32)}),
        ]
    },
    "npu_top_k_top_p": {
        "": [
            ("logits are [rows", {"logits": empty(1, 4, 99)}),
            ("logits are floats", {"logits": empty(4, 99, dtype=INT8)}),
            ("both left out", {"p": None, "k": None}),
            ("p has the dtype", {"p": empty(4, dtype=FP32)}),
            ("p has one value", {"p": empty(1)}),
            ("k is int32", {"k": empty(4, dtype=torch.int64)}),
            ("k has one value", {"k": empty(1, dtype=INT32)}),
        ]
    },
}

# What torch_npu's Meta kernels accept: operator, kind of call, what is wrong with it.
FIRST = "npu_fused_infer_attention_score"
NINE = [
    (FIRST, "decode", {"num_heads": 10, "num_key_value_heads": 1}),
    (FIRST, "decode", {"block_table": empty(2, 3, dtype=torch.float32)}),
    (FIRST, "decode", {"block_size": 256}),
    (FIRST, "decode", {"query": empty(2, 1, 1024, dtype=torch.float32)}),
    (FIRST, "decode", {"actual_seq_lengths_kv": torch.tensor([129, 300])}),
    ("npu_quant_matmul", "", {"x1": empty(4, 96), "x2": empty(96, 64)}),
    ("npu_grouped_matmul", "", {"weight": [empty(8, 64, 96)]}),
    ("npu_weight_quant_batchmatmul", "", {"weight": empty(64, 96, dtype=torch.int8)}),
    ("npu_add_rms_norm", "", {"gamma": empty(64)}),
]
