"""What MTP's step serves of SGLang's latent attention on an NPU: its fused prolog, which writes the
cache itself (``SGLANG_NPU_USE_MLAPO=1``), where prefill writes it in the same order; neither its
tiled cache (``SGLANG_USE_FIA_NZ=1``) nor sparse attention."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa
from sglang.srt.environ import envs
from sglang.srt.utils.common import get_bool_env_var

from sglang_ascend.ops.npu.latents import untaken_latents
from sglang_ascend.plugin.errors import StartupRefused

logger = logging.getLogger(__name__)

PROLOG = envs.SGLANG_NPU_USE_MLAPO.name
TILED_CACHE = "SGLANG_USE_FIA_NZ"


def refuse_unserved_attention(server_args: Any) -> None:
    """Raises StartupRefused."""
    model_config = model_config_of(server_args)
    if is_deepseek_dsa(model_config.hf_config):
        raise StartupRefused(
            "--speculative-algorithm MTP serves no sparse attention on an NPU, which the model's "
            "config.json asks for by index_topk: use SGLang's NEXTN for this model."
        )
    if get_bool_env_var(TILED_CACHE):
        raise StartupRefused(
            f"{TILED_CACHE} lays the KV cache out in tiles, and MTP's step reads rows: unset it; "
            f"{PROLOG} may stay."
        )
    if untaken := untaken_latents(model_config.hf_text_config.to_dict()):
        logger.warning("%s: expect CANN to refuse them where it is not emulated.", untaken)
    if not envs.SGLANG_NPU_USE_MLAPO.get():
        return
    if model_config.attention_arch != AttentionArch.MLA:
        return  # SGLang looks at the variable for latent attention only
    for where, holds in _unserved(server_args, model_config).items():
        if holds:
            raise StartupRefused(f"{PROLOG} is not served {where}.")


def _unserved(server_args: Any, model_config: Any) -> dict[str, bool]:
    """By what the sentence says, with its remedy."""
    text_config = model_config.hf_text_config
    return {
        # SGLang's own int8 linears go to a kernel that takes static scales of their inputs alone.
        f"with --quantization {server_args.quantization}: leave that flag out, or unset it": (
            server_args.quantization is not None
        ),
        # SGLang's class takes a product that such a model does not have.
        "where config.json has no q_lora_rank: unset it": (
            getattr(text_config, "q_lora_rank", None) is None
        ),
        # It writes the first elements of all rotated pairs, then the second. SGLang's prefill does
        # so with YaRN's scaling only, and else leaves pairs side by side, in the same cache.
        "where config.json has no rope_scaling: unset it": (
            not must_absorb_prefill(model_config) and not _scales_positions(text_config)
        ),
    }


def must_absorb_prefill(model_config: Any) -> bool:
    """SGLang's prefill of latent attention on NPU takes heads whose keys (without rope) and values
    have one width."""
    is_latent = model_config.attention_arch == AttentionArch.MLA
    return is_latent and model_config.qk_nope_head_dim != model_config.v_head_dim


def _scales_positions(text_config: Any) -> bool:
    """As ``DeepseekV2DecoderLayer`` reads it."""
    scaling = getattr(text_config, "rope_parameters", None) or text_config.rope_scaling
    return bool(scaling) and scaling.get("rope_type") != "default"


def follow_absorbed_weights(model: torch.nn.Module) -> None:
    """After an update of ``model``'s weights: the prolog multiplies by a copy of each layer's
    ``w_kc``, which captured steps read where it lies."""
    for layer in model.modules():
        prolog = getattr(layer, "mla_preprocess", None)
        if prolog is not None:
            prolog.w_kc.copy_(layer.w_kc)
