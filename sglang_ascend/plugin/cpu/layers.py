"""SGLang's layers on CPU, through ``ops``: its own fallbacks are PyTorch expressions, and its
products repack their weights in every call.

A layer of a kind or in a setting that a body here does not compute keeps SGLang's fallback.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_v2 import MoEGate
from sglang.srt.models.mimo_mtp import MiMoMTP
from sglang.srt.runtime_context import get_parallel

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.ops import layers as ops
from sglang_ascend.ops import linear
from sglang_ascend.ops.linear.reference import PreparedWeight
from sglang_ascend.plugin.attention.backend import attend_grouped


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


def asks_for_another_dtype(module: torch.nn.Module) -> bool:
    """Whether a model's logits are computed in another dtype than its head's."""
    return isinstance(module, LogitsProcessor) and (
        module.use_fp32_lm_head or module.rl_on_policy_target is not None
    )


@dataclass(frozen=True)
class DraftRows:
    """What an MTP layer is given of its rows."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    states: torch.Tensor  # [rows, hidden_size], of the token before each
    slots: torch.Tensor  # int64 [rows], of their keys and values
    metadata: StepMetadata  # what they see
    batch: ForwardBatch

    @property
    def write_loc(self) -> KVWriteLoc:
        return KVWriteLoc(self.slots, None)

    def of_requests(self, last_rows: torch.Tensor) -> DraftRows:
        """These rows alone, one of a request."""
        return replace(
            self,
            tokens=self.tokens[last_rows],
            positions=self.positions[last_rows],
            states=self.states[last_rows],
            slots=self.slots[last_rows],
            metadata=self.metadata.of_last_rows(last_rows),
        )


class Drafts(ABC):
    """The forward of an MTP layer: the functions that SGLang's modules call, one after another. At
    a row or two the modules take longer around the products than these do.

    Of a model that it does not serve SGLang's forward stays.
    """

    # Of more rows of requests that have several, only the last of each go past the keys.
    most_whole_rows = 16

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
            and not asks_for_another_dtype(model.logits_processor)
        )

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """input_ids and positions [rows] -> of each request logits, float32 [batch, tokens that a
        draft can be], and hidden states, [batch, hidden_size]."""
        last_rows = _last_rows(forward_batch)
        if last_rows is None and not forward_batch.forward_mode.is_decode():
            return self.of_sglang(input_ids, positions, forward_batch)
        rows = DraftRows(
            input_ids,
            positions,
            forward_batch.spec_info.hidden_states,
            forward_batch.out_cache_loc,
            get_attn_backend().step_metadata,
            forward_batch,
        )
        hidden = self._of_requests(rows, last_rows)
        head = self.model.lm_head
        logits = head.quant_method.apply(head, hidden)[:, : self.model.config.vocab_size]
        return LogitsProcessorOutput(next_token_logits=logits.float(), hidden_states=hidden)

    def _of_requests(self, rows: DraftRows, last_rows: torch.Tensor | None) -> torch.Tensor:
        """[batch, hidden_size]. Nobody drafts behind the other rows, and keys and values depend on
        no other row in the only layer of a model."""
        if last_rows is None:
            return self._hidden_states(rows)
        if len(rows.tokens) <= self.most_whole_rows:
            return self._hidden_states(rows)[last_rows]
        self._write_keys(rows)
        return self._hidden_states(rows.of_requests(last_rows))

    @abstractmethod
    def _write_keys(self, rows: DraftRows) -> None:
        """And values."""

    @abstractmethod
    def _hidden_states(self, rows: DraftRows) -> torch.Tensor:
        """[rows, hidden_size], behind the layer's last norm; keys and values are written too."""


def _last_rows(forward_batch: ForwardBatch) -> torch.Tensor | None:
    """Of each request in a step that has several, or in a prompt."""
    mode = forward_batch.forward_mode
    if mode.is_draft_extend_v2():
        return forward_batch.spec_info.select_index
    if mode == ForwardMode.EXTEND and forward_batch.mm_input_embeds is None:
        return forward_batch.extend_seq_lens.cumsum(0) - 1
    return None


class MimoDrafts(Drafts):
    """``MiMoMTP.forward``."""

    @staticmethod
    def serves(model: torch.nn.Module) -> bool:
        return type(model) is MiMoMTP and Drafts.is_whole(
            model, model.model.mtp_block.self_attn, RotaryEmbedding
        )

    def _write_keys(self, rows: DraftRows) -> None:
        _, (_, k, v) = self._projected(rows)
        layer = self.model.model.mtp_block.self_attn.attn
        get_attn_backend().token_to_kv_pool.set_kv_buffer(layer, rows.write_loc, k, v)

    def _hidden_states(self, rows: DraftRows) -> Any:
        block = self.model.model.mtp_block
        joined, (q, k, v) = self._projected(rows)
        pool, attention = get_attn_backend().token_to_kv_pool, block.self_attn
        attended = attend_grouped(rows.metadata, pool, attention.attn, q, k, v, rows.write_loc)
        attended = multiply(attention.o_proj, attended)
        normed, residual = rms_norm(block.post_attention_layernorm, attended, joined)
        gated = silu_and_mul(block.mlp.act_fn, multiply(block.mlp.gate_up_proj, normed))
        hidden = multiply(block.mlp.down_proj, gated) + residual
        return rms_norm(self.model.model.final_layernorm, hidden)

    def _projected(self, rows: DraftRows) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """What token and state are joined to, and its queries, keys and values."""
        layer, block = self.model.model, self.model.model.mtp_block
        embeds = layer.embed_tokens.quant_method.embedding(layer.embed_tokens, rows.tokens)
        embeds[rows.positions == 0] = 0
        state = rms_norm(layer.hidden_layernorm, rows.states)
        token = rms_norm(layer.token_layernorm, embeds)
        joined = project(layer.input_proj, torch.cat((state, token), dim=-1))
        attention = block.self_attn
        qkv = multiply(attention.qkv_proj, rms_norm(block.input_layernorm, joined))
        q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        q, k = rotate(attention.rotary_emb, rows.positions, q, k)
        k, v = (x.view(len(x), attention.num_kv_heads, attention.head_dim) for x in (k, v))
        return joined, (q, k, v)


def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.quant_method.apply(layer, x, layer.bias)
