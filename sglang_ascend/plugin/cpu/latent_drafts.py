"""DeepSeek-V3's MTP layer on CPU without SGLang's modules: of a few rows in one compiled call where
its weights are floats, otherwise function by function."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.ops import drafts, linear
from sglang_ascend.ops.chain.reference import DraftDecodeInputs
from sglang_ascend.ops.drafts.reference import LatentLayer
from sglang_ascend.plugin.attention.backend import attend_latent
from sglang_ascend.plugin.cpu.experts import chooses_by_groups, multiplies_by_swiglu
from sglang_ascend.plugin.cpu.layers import (
    DraftRows,
    Drafts,
    PreparedHead,
    PreparedLinear,
    is_usual_norm,
    multiply,
    prepared_weight,
    project,
    rms_norm,
    rotate_latent,
)


class NextNDrafts(Drafts):
    """``DeepseekV3ForCausalLMNextN.forward``; where it is not compiled, its experts are multiplied
    by their module."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._layer: LatentLayer | None = None

    @cached_property
    def _is_float(self) -> bool:
        return is_float(self.model)

    @staticmethod
    def serves(model: torch.nn.Module) -> bool:
        """Queries are projected down and up again, as DeepSeek-V3's are, all that is cached is
        attended to, and the halves of ``kv_b_proj`` are float."""
        if type(model) is not DeepseekV3ForCausalLMNextN:
            return False
        attention: Any = model.model.decoder.self_attn
        return (
            Drafts.is_whole(model, attention, DeepseekScalingRotaryEmbedding)
            and not attention.rotary_emb.is_neox_style
            and hasattr(attention, "fused_qkv_a_proj_with_mqa")
            and isinstance(model.model.eh_proj, torch.nn.Linear)
            and not attention.use_dsa
            and attention.w_kc.dtype == attention.w_vc.dtype == model.model.eh_proj.weight.dtype
        )

    def _write_keys(self, rows: DraftRows) -> None:
        _, (_, key, k_rope) = self._projected(rows)
        attention: Any = self.model.model.decoder.self_attn
        _, k_rope = rotate_latent(attention.rotary_emb, rows.positions, k_rope, k_rope)
        pool = get_attn_backend().token_to_kv_pool
        pool.set_mla_kv_buffer(attention.attn_mqa, rows.write_loc, key, k_rope)

    def _hidden_states(self, rows: DraftRows) -> Any:
        compiled = self._compiled(rows.metadata, rows.states)
        if compiled is not None:
            return self._at_once(compiled, rows)
        layer: Any = self.model.model
        block = layer.decoder
        joined, projected = self._projected(rows)
        attended = self._attended(rows, *projected)
        normed, residual = rms_norm(block.post_attention_layernorm, attended, joined)
        hidden = block.mlp(normed, rows.batch)
        return rms_norm(layer.shared_head.norm, hidden, residual)[0]

    def chain(
        self,
        ahead: DraftDecodeInputs,
        metadata: StepMetadata,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor | None:
        layer, head = self._compiled(metadata, hidden), self.model.lm_head
        if layer is None or type(head.quant_method) is not PreparedHead:
            return None
        prepared = prepared_weight(head)
        if len(tokens) > prepared.most_rows or prepared.dense.dtype != hidden.dtype:
            return None
        return drafts.latent_chain(
            layer,
            prepared,
            tokens,
            hidden,
            ahead.positions,
            self._cache(),
            ahead.slots,
            metadata.block_table,
            ahead.kv_lens,
            page_size=metadata.page_size,
            vocab_size=self.model.config.vocab_size,
        )

    def _cache(self) -> torch.Tensor:
        attention = self.model.model.decoder.self_attn.attn_mqa
        return get_attn_backend().token_to_kv_pool.get_key_buffer(attention.layer_id)

    def _compiled(self, metadata: StepMetadata, states: torch.Tensor) -> LatentLayer | None:
        """The layer for as many rows, None where it is not compiled for them."""
        cache_dtype = get_attn_backend().token_to_kv_pool.dtype
        if not (self._is_float and metadata.is_uniform and cache_dtype == states.dtype):
            return None
        # Weights that have changed were prepared anew.
        if self._layer is None or self._layer.join is not prepared_weight(self.model.model.eh_proj):
            self._layer = drafts.prepare_latent(latent_layer(self.model))
        return self._layer if len(states) <= self._layer.most_rows else None

    def _at_once(self, layer: LatentLayer, rows: DraftRows) -> torch.Tensor:
        metadata = rows.metadata
        return drafts.latent_layer(
            layer,
            rows.tokens,
            rows.states,
            rows.positions,
            self._cache(),
            rows.slots,
            metadata.block_table,
            metadata.kv_lens,
            query_len=metadata.query_len,
            page_size=metadata.page_size,
        )

    def _projected(self, rows: DraftRows) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """What token and state are joined to, and what it is projected down to: queries, keys
        without and with a position, neither turned."""
        layer: Any = self.model.model
        attention = layer.decoder.self_attn
        embeds = layer.embed_tokens.quant_method.embedding(layer.embed_tokens, rows.tokens)
        token, state = rms_norm(layer.enorm, embeds), rms_norm(layer.hnorm, rows.states)
        joined: Any = project(layer.eh_proj, torch.cat((token, state), dim=-1))
        normed: Any = rms_norm(layer.decoder.input_layernorm, joined)
        sizes = attention.q_lora_rank, attention.kv_lora_rank, attention.qk_rope_head_dim
        q, latent, k_rope = multiply(attention.fused_qkv_a_proj_with_mqa, normed).split(sizes, -1)
        key: Any = rms_norm(attention.kv_a_layernorm, latent)
        return joined, (q, key[:, None], k_rope[:, None])

    def _attended(
        self, rows: DraftRows, q: Any, key: torch.Tensor, k_rope: torch.Tensor
    ) -> torch.Tensor:
        """Latent attention: queries are taken to the latent space, and what they attend to is
        brought back from it."""
        attention: Any = self.model.model.decoder.self_attn
        rank, num_heads = attention.kv_lora_rank, attention.num_local_heads
        q = multiply(attention.q_b_proj, rms_norm(attention.q_a_layernorm, q))
        sizes = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        q, q_rope = q.view(len(q), num_heads, -1).split(sizes, dim=-1)
        q = linear.by_head(q, attention.w_kc)
        q_rope, k_rope = rotate_latent(attention.rotary_emb, rows.positions, q_rope, k_rope)
        pool, layer = get_attn_backend().token_to_kv_pool, attention.attn_mqa
        of_rows = rows.metadata, pool, layer, q, key, key, rows.write_loc
        attended = attend_latent(*of_rows, q_rope=q_rope, k_rope=k_rope)
        values = linear.by_head(attended.view(len(q), num_heads, rank), attention.w_vc)
        return multiply(attention.o_proj, values.flatten(1))


def is_float(model: Any) -> bool:
    """Whether the layer is one of ``ops.drafts.reference.LatentLayer``: floats throughout, the
    usual norms, experts that are chosen by groups, and shared ones that are multiplied as one."""
    block = model.model.decoder
    attention, moe = block.self_attn, block.mlp
    if type(moe) is not DeepseekV2MoE or moe.shared_experts is None:
        return False
    linears = (
        attention.fused_qkv_a_proj_with_mqa,
        attention.q_b_proj,
        attention.o_proj,
        moe.shared_experts.gate_up_proj,
        moe.shared_experts.down_proj,
    )
    return (
        all(type(x.quant_method) is PreparedLinear and x.bias is None for x in linears)
        and all(is_usual_norm(x) for x in model.modules() if isinstance(x, RMSNorm))
        and type(moe.experts.quant_method) is UnquantizedFusedMoEMethod
        and multiplies_by_swiglu(moe.experts.quant_method, moe.experts)
        and chooses_by_groups(moe.topk)
        and not moe.topk.topk_config.apply_routed_scaling_factor_on_output
        and moe.shared_experts.swiglu_limit is None
    )


def latent_layer(model: Any) -> LatentLayer:
    """Of a model of which ``is_float`` holds."""
    layer = model.model
    block = layer.decoder
    attention, moe = block.self_attn, block.mlp
    choice, shared = moe.topk.topk_config, moe.shared_experts
    return LatentLayer(
        embedding=layer.embed_tokens.weight.data,
        token_norm=layer.enorm.weight.data,
        state_norm=layer.hnorm.weight.data,
        join=prepared_weight(layer.eh_proj),
        input_norm=block.input_layernorm.weight.data,
        down=prepared_weight(attention.fused_qkv_a_proj_with_mqa),
        query_norm=attention.q_a_layernorm.weight.data,
        query_up=prepared_weight(attention.q_b_proj),
        key_norm=attention.kv_a_layernorm.weight.data,
        to_latent=attention.w_kc.contiguous(),
        from_latent=attention.w_vc.contiguous(),
        cos_sin=attention.rotary_emb.cos_sin_cache,
        attention_out=prepared_weight(attention.o_proj),
        experts_norm=block.post_attention_layernorm.weight.data,
        router=prepared_weight(moe.gate),
        router_bias=choice.correction_bias.float(),
        experts_gate_up=moe.experts.w13_weight.data,
        experts_down=moe.experts.w2_weight.data,
        shared_gate_up=prepared_weight(shared.gate_up_proj),
        shared_down=prepared_weight(shared.down_proj),
        output_norm=layer.shared_head.norm.weight.data,
        eps=block.input_layernorm.variance_epsilon,
        latent_eps=attention.kv_a_layernorm.variance_epsilon,
        num_experts_per_token=choice.top_k,
        num_groups=choice.num_expert_group,
        num_kept_groups=choice.topk_group,
        routed_scale=moe.routed_scaling_factor,
        attention_scale=attention.attn_mqa.scaling,
    )
