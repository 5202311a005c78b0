"""DeepSeek-V3's MTP layer on CPU without SGLang's modules."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN

from sglang_ascend.plugin.attention.backend import attend
from sglang_ascend.plugin.cpu.layers import Drafts, multiply, project, rms_norm, rotate_latent


class NextNDrafts(Drafts):
    """``DeepseekV3ForCausalLMNextN.forward``; its experts are multiplied by their module."""

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

    def _hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> Any:
        layer: Any = self.model.model
        block = layer.decoder
        embeds = layer.embed_tokens.quant_method.embedding(layer.embed_tokens, input_ids)
        token = rms_norm(layer.enorm, embeds)
        state = rms_norm(layer.hnorm, forward_batch.spec_info.hidden_states)
        joined = project(layer.eh_proj, torch.cat((token, state), dim=-1))
        attended = self._attended(rms_norm(block.input_layernorm, joined), positions, forward_batch)
        normed, residual = rms_norm(block.post_attention_layernorm, attended, joined)
        hidden = block.mlp(normed, forward_batch)
        return rms_norm(layer.shared_head.norm, hidden, residual)[0]

    def _attended(
        self, x: Any, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Latent attention: queries are taken to the latent space, and what they attend to is
        brought back from it."""
        attention: Any = self.model.model.decoder.self_attn
        rank, num_heads = attention.kv_lora_rank, attention.num_local_heads
        sizes = attention.q_lora_rank, rank, attention.qk_rope_head_dim
        q, latent, k_rope = multiply(attention.fused_qkv_a_proj_with_mqa, x).split(sizes, dim=-1)
        key: Any = rms_norm(attention.kv_a_layernorm, latent)
        q = multiply(attention.q_b_proj, rms_norm(attention.q_a_layernorm, q))
        sizes = attention.qk_nope_head_dim, attention.qk_rope_head_dim
        q, q_rope = q.view(len(x), num_heads, -1).split(sizes, dim=-1)
        q = torch.bmm(q.transpose(0, 1), attention.w_kc).transpose(0, 1)
        q_rope, k_rope = rotate_latent(attention.rotary_emb, positions, q_rope, k_rope[:, None])
        latent, rope = key[:, None], {"q_rope": q_rope, "k_rope": k_rope}
        backend, layer = get_attn_backend(), attention.attn_mqa
        attended = attend(backend, q, latent, latent, layer, forward_batch, True, **rope)
        attended = attended.view(len(x), num_heads, rank).transpose(0, 1)
        values = torch.bmm(attended, attention.w_vc).transpose(0, 1)
        return multiply(attention.o_proj, values.flatten(1))
