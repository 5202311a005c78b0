"""SGLang's layers on CPU, through ``ops``: its own fallbacks are PyTorch expressions, and its
products repack their weights in every call.

A layer of a kind or in a setting that a body here does not compute keeps SGLang's fallback.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_v2 import MoEGate
from sglang.srt.models.mimo_mtp import MiMoMTP
from sglang.srt.runtime_context import get_parallel

from sglang_ascend.ops import layers as ops
from sglang_ascend.ops import linear
from sglang_ascend.ops.linear.reference import PreparedWeight
from sglang_ascend.plugin.attention.backend import attend
from sglang_ascend.plugin.cpu import experts


def register_layers(platform_key: str) -> None:
    """In the slot that SGLang has for out-of-tree platforms."""
    for layer, forward in (
        (RMSNorm, rms_norm),
        (RotaryEmbedding, rotate),
        (DeepseekScalingRotaryEmbedding, rotate_latent),
        (SiluAndMul, silu_and_mul),
        (TopK, experts.choose),
        (UnquantizedFusedMoEMethod, experts.multiply),
    ):
        BaseFusedOp.register_oot_forward(layer, forward, platform_key)


def rms_norm(
    self: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if not is_usual_norm(self) or post_residual_addition is not None:
        return self.forward_native(x, residual, post_residual_addition)
    weight = self.weight.data
    if residual is None:
        return ops.rms_norm(x, weight, self.variance_epsilon)
    return ops.add_rms_norm(x, residual, weight, self.variance_epsilon)


def is_usual_norm(norm: RMSNorm) -> bool:
    """Over all columns, rounded once."""
    return not (
        norm.cast_x_before_out_mul
        or norm.fp32_residual
        or norm.override_orig_dtype is not None
        or norm.variance_size_override is not None
    )


def rotate(
    self: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key [rows, heads * head_dim] -> the same shapes."""
    if not self.is_neox_style or offsets is not None or fused_set_kv_buffer_arg is not None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    positions = positions.flatten()
    heads_of = (len(positions), -1, self.head_size)
    rotated = ops.rotate_neox(
        query.view(heads_of), key.view(heads_of), positions, self.cos_sin_cache
    )
    return rotated[0].view(query.shape), rotated[1].view(key.shape)


def rotate_latent(
    self: DeepseekScalingRotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key [rows, heads, head_dim] -> the same shapes."""
    if self.is_neox_style or offsets is not None:
        return self.forward_native(positions, query, key, offsets)
    return ops.rotate_interleaved(query, key, positions.flatten(), self.cos_sin_cache)


def silu_and_mul(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    return ops.swiglu(x)


_PREPARED: WeakKeyDictionary[torch.nn.Module, PreparedWeight] = WeakKeyDictionary()


def prepared_weight(layer: torch.nn.Module) -> PreparedWeight:
    """What ``ops.linear`` made of the layer's weight: at its first use, and after a new weight."""
    prepared = _PREPARED.get(layer)
    if prepared is None or prepared.dense is not layer.weight:
        prepared = _PREPARED[layer] = linear.prepare(layer.weight)
    return prepared


def forget_prepared_weights() -> None:
    """To be called when weights were changed in place."""
    _PREPARED.clear()


class PreparedLinear(UnquantizedLinearMethod):
    """``F.linear`` on CPU repacks the weight in every call: 4 rows cost twice 1 row."""

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return linear.linear(x, prepared_weight(layer), bias)


class PreparedHead(UnquantizedEmbeddingMethod):
    """An embedding that may be the head too; its logits have the dtype of its weight."""

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        prepared = prepared_weight(layer)
        return linear.linear(x.to(prepared.dense.dtype), prepared, bias)


def project(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """For ``torch.nn.Linear.forward``: SGLang's MTP layers join state and token by such a layer."""
    return linear.linear(x, prepared_weight(self), self.bias)


def score(self: MoEGate, hidden_states: torch.Tensor, *others: Any) -> torch.Tensor:
    """For ``MoEGate.forward``: what a router gives each expert."""
    return linear.linear(hidden_states.to(self.weight.dtype), prepared_weight(self))


def prepare_layers(model: torch.nn.Module) -> None:
    """Gives ``model``'s unquantized layers these methods; others keep theirs."""
    prepared: dict[type, type] = {UnquantizedLinearMethod: PreparedLinear}
    if not any(_asks_for_another_dtype(module) for module in model.modules()):
        prepared[UnquantizedEmbeddingMethod] = PreparedHead
    for layer in model.modules():
        method = prepared.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method()
        elif type(layer) is torch.nn.Linear:
            layer.forward = MethodType(project, layer)
        elif type(layer) is MoEGate:
            layer.forward = MethodType(score, layer)


def _asks_for_another_dtype(module: torch.nn.Module) -> bool:
    """Whether a model's logits are computed in another dtype than its head's."""
    return isinstance(module, LogitsProcessor) and (
        module.use_fp32_lm_head or module.rl_on_policy_target is not None
    )


class Drafts(ABC):
    """The forward of an MTP layer: the functions that SGLang's modules call, one after another. At
    a row or two the modules take longer around the products than these do.

    Of a request's rows a draft follows the last one alone. The others leave their keys and values,
    which depend on no other row in a layer that is the only one, and go no further.

    Of a model that it does not serve SGLang's forward stays.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.of_sglang: Any = model.forward

    @staticmethod
    def is_whole(model: Any, attention: Any, rotation: type) -> bool:
        """One rank has the whole layer, which rotates as a function here does, and the head's
        method makes its logits."""
        return (
            get_parallel().tp_size == 1
            and type(attention.rotary_emb) is rotation
            and not _asks_for_another_dtype(model.logits_processor)
        )

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """input_ids and positions [rows] -> of each request logits, float32 [batch, tokens that a
        draft can be], and hidden states, [batch, hidden_size]."""
        last_rows = _last_rows(forward_batch)
        if last_rows is None and not forward_batch.forward_mode.is_decode():
            return self.of_sglang(input_ids, positions, forward_batch)
        hidden = self._hidden_states(input_ids, positions, forward_batch, last_rows)
        head = self.model.lm_head
        logits = head.quant_method.apply(head, hidden)[:, : self.model.config.vocab_size]
        return LogitsProcessorOutput(next_token_logits=logits.float(), hidden_states=hidden)

    @abstractmethod
    def _hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        last_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """[rows] -> [batch, hidden_size], behind the last norm. None: a request has one row."""


def _last_rows(forward_batch: ForwardBatch) -> torch.Tensor | None:
    """Of each request in a step that has several, or in a prompt."""
    mode = forward_batch.forward_mode
    if mode.is_draft_extend_v2():
        return forward_batch.spec_info.select_index
    if mode == ForwardMode.EXTEND and forward_batch.mm_input_embeds is None:
        return forward_batch.extend_seq_lens.cumsum(0) - 1
    return None


def write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: ForwardBatch,
    last_rows: torch.Tensor | None,
    **rope: torch.Tensor,
) -> torch.Tensor:
    """Keys and values of all rows are written; ``q`` has the last rows, or all."""
    backend = get_attn_backend()
    metadata = None if last_rows is None else backend.step_metadata.of_last_rows(last_rows)
    return attend(backend, q, k, v, layer, forward_batch, True, metadata, **rope)


class MimoDrafts(Drafts):
    """``MiMoMTP.forward``."""

    @staticmethod
    def serves(model: torch.nn.Module) -> bool:
        return type(model) is MiMoMTP and Drafts.is_whole(
            model, model.model.mtp_block.self_attn, RotaryEmbedding
        )

    def _hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        last_rows: torch.Tensor | None,
    ) -> Any:
        layer, block = self.model.model, self.model.model.mtp_block
        embeds = layer.embed_tokens.quant_method.embedding(layer.embed_tokens, input_ids)
        embeds[positions == 0] = 0
        state = rms_norm(layer.hidden_layernorm, forward_batch.spec_info.hidden_states)
        token = rms_norm(layer.token_layernorm, embeds)
        joined = project(layer.input_proj, torch.cat((state, token), dim=-1))

        attention = block.self_attn
        qkv = multiply(attention.qkv_proj, rms_norm(block.input_layernorm, joined))
        q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        q, k = rotate(attention.rotary_emb, positions, q, k)
        k, v = (x.view(len(x), attention.num_kv_heads, attention.head_dim) for x in (k, v))
        if last_rows is not None:
            q, joined = q[last_rows], joined[last_rows]
        attended = write_and_attend(q, k, v, attention.attn, forward_batch, last_rows)
        attended = multiply(attention.o_proj, attended)

        normed, residual = rms_norm(block.post_attention_layernorm, attended, joined)
        gated = silu_and_mul(block.mlp.act_fn, multiply(block.mlp.gate_up_proj, normed))
        hidden = multiply(block.mlp.down_proj, gated) + residual
        return rms_norm(layer.final_layernorm, hidden)


def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.quant_method.apply(layer, x, layer.bias)
