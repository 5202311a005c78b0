"""Owns the trainable NextN layer of nano-deepseek: DeepSeek's MTP module with one expert layer.

Matches SGLang 0.5.23's `models/deepseek_nextn.py`: [enorm(embedding), hnorm(hidden)] in that order,
no zeroed embedding at position 0, and a recursion on the output after `shared_head.norm`.
"""

import torch
from torch import Tensor, nn

from sglang_ascend.training.deepseek import DecoderLayer
from sglang_ascend.training.interface import ChainCache, chain_mask
from sglang_ascend.training.nano_config import NanoConfig
from sglang_ascend.training.nano_experts import RMSNorm, linear


class SharedHead(nn.Module):
    """The norm before the target's head, which the layer shares and does not hold."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class NextNLayer(DecoderLayer):
    """Implements `interface.MTPLayer`; parameter names are those below `model.layers.<n>`."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__(config, dense=False)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, cache: ChainCache
    ) -> Tensor:
        """See `interface.MTPLayer.forward`."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], -1))
        mask = chain_mask(x.shape[1], cache.step, x.device)
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        cache.steps.append((k.transpose(1, 2), v.transpose(1, 2)))
        keys = torch.cat([k for k, _ in cache.steps], 1).transpose(1, 2)
        values = torch.cat([v for _, v in cache.steps], 1).transpose(1, 2)
        x = x + self.self_attn.attend(q, keys, values, mask)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.shared_head.norm(x)
