"""Of SGLang's models on an NPU: forwards that it cannot capture as they are, and experts' gates."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.models.ernie4_eagle import Ernie4ModelMTP
from sglang.srt.models.mimo_mtp import MiMoMultiTokenPredictorLayer


def make_capturable(model: torch.nn.Module) -> None:
    """Changes the draft worker's own MTP layer, and no other of its class."""
    for layer in model.modules():
        if isinstance(layer, MiMoMultiTokenPredictorLayer):
            layer.forward = MethodType(mimo_mtp_forward, layer)
        if isinstance(layer, Ernie4ModelMTP):
            layer.forward = MethodType(ernie_mtp_forward, layer)


def mimo_mtp_forward(
    self: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None = None,
) -> torch.Tensor:
    """For ``MiMoMultiTokenPredictorLayer.forward``, which assigns through a boolean mask: the
    device then tells the host how many rows it found. -> [rows, hidden_size]"""
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    embeds = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
    embeds = embeds.masked_fill((positions == 0)[:, None], 0)
    parts = (
        self.hidden_layernorm(forward_batch.spec_info.hidden_states),
        self.token_layernorm(embeds),
    )
    hidden_states = self.input_proj(torch.cat(parts, dim=-1))
    residual_batch.start(forward_batch)
    hidden_states = self.mtp_block(
        positions=positions, hidden_states=hidden_states, forward_batch=forward_batch
    )
    hidden_states = residual_batch.fold(hidden_states, forward_batch)
    hidden_states = residual_batch.take_output(hidden_states, forward_batch)
    return self.final_layernorm(hidden_states)


def ernie_mtp_forward(
    self: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None = None,
) -> torch.Tensor:
    """For ``Ernie4ModelMTP.forward``, which does the same. -> [rows, hidden_size]"""
    embeds = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
    embeds = embeds.masked_fill((positions == 0)[:, None], 0)
    parts = (
        self.mtp_emb_norm(embeds),
        self.mtp_hidden_norm(forward_batch.spec_info.hidden_states),
    )
    hidden_states, residual = self.mtp_block(
        positions=positions,
        hidden_states=self.mtp_linear_proj(torch.cat(parts, dim=-1)),
        forward_batch=forward_batch,
        residual=None,
    )
    return residual + hidden_states


def leave_norm_to_the_gate(model: torch.nn.Module) -> None:
    """CANN's gate divides sigmoid's weights by their sum, whatever its ``renorm`` says. With that
    argument, which SGLang gives, CANN 8.5 refuses the call, and later ones leave the kernel that
    they have for DeepSeek-V3's gate."""
    for layer in model.modules():
        if isinstance(layer, TopK):
            gate = layer.topk_config
            is_biased = gate.use_grouped_topk or gate.correction_bias is not None
            if gate.scoring_func == "sigmoid" and is_biased:
                gate.renormalize = False
