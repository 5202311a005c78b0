"""One layer of a checkpoint at a time, with every expert's linear as a module of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.packs import Pack, packed
from sglang_ascend.training.targets.quantized import fill, separate_experts


class Layers:
    """The parts of one model over one checkpoint, built when they are asked for and not kept."""

    def __init__(self, target: Target, weights: Weights) -> None:
        if target.is_llama:
            raise CheckpointError(
                f"{target.folder} is a Llama, which MTP serves by another name; quantize the "
                "checkpoint that `sglang-ascend train export` makes of it"
            )
        self.target, self.weights = target, weights
        config = target.model_config
        model = target.skeleton().model
        self.num_layers = config.num_hidden_layers
        self._class, self._norm = type(model.layers[0]), type(model.norm)
        self._rotary = type(model.rotary_emb)(config)

    def skeleton(self, index: int) -> nn.Module:
        """Decoder layer `index`, or the MTP layer's behind the last, without weights."""
        is_mtp = index == self.num_layers
        kind = 0 if is_mtp and not self.target.family.mtp_is_sparse else index
        with torch.device("meta"):
            layer = self._class(self.target.model_config, kind)
        separate_experts(layer)
        return layer

    def decoder(self, index: int) -> nn.Module:
        """Decoder layer `index`."""
        layer = self.skeleton(index)
        prefix = self.prefix(index)
        fill(layer, self.weights, lambda name: prefix + name)
        return layer

    def prefix(self, index: int) -> str:
        """Of the names of decoder layer `index`; behind the last comes the MTP layer."""
        return f"model.layers.{index}." if index < self.num_layers else self.target.mtp_prefix

    def mtp(self) -> MTPLayer:
        """The MTP layer; the linears that a recipe may name lie under `block`."""
        layer = MTPLayer(self.target)
        separate_experts(layer.block)
        fill(layer, self.weights, lambda name: self.target.mtp_prefix + layer.checkpoint_name(name))
        return layer

    def run(self, layer: nn.Module, hidden: Tensor, pack: Pack) -> Tensor:
        """[rows, size] of a pack through a decoder layer."""
        return layer(
            hidden[None],
            attention_mask=pack.mask,
            position_ids=pack.positions,
            position_embeddings=self._rotary(hidden[None], pack.positions),
        )[0]

    def final_hidden(self, tokens: list[Tensor]) -> list[Tensor]:
        """[length, size] of every sequence behind the last norm, with one layer in memory."""
        packs, embedding = packed(tokens), self.embedding()
        states = [embedding[pack.tokens] for pack in packs]
        for index in range(self.num_layers):
            layer = self.decoder(index)
            states = [self.run(layer, *rows) for rows in zip(states, packs, strict=True)]
            del layer  # before the next is read
        norm = self.final_norm()
        pairs = zip(states, packs, strict=True)
        return [rows for state, pack in pairs for rows in norm(state).split(pack.lengths)]

    def embedding(self) -> Tensor:
        """[vocabulary, size]"""
        name = "model.embed_tokens.weight"
        return self.weights.read([name])[name]

    def head(self) -> Tensor:
        """[vocabulary, size], the embedding where they are tied; a quantized one is decoded."""
        if quantized := self.weights.quantized("lm_head"):
            return quantized.dequantize()
        if self.target.config.flag("tie_word_embeddings"):
            return self.embedding()
        return self.weights.read(["lm_head.weight"])["lm_head.weight"]

    def logits(self, head: Tensor) -> Callable[[Tensor], Tensor]:
        """Hidden states [rows, size] -> [rows, vocabulary], as `head` is served."""
        if product := self.weights.product("lm_head"):
            return product
        return lambda hidden: F.linear(hidden, head)

    def final_norm(self) -> nn.Module:
        config = self.target.model_config
        norm = self._norm(config.hidden_size, eps=config.rms_norm_eps)
        fill(norm, self.weights, lambda name: f"model.norm.{name}")
        return norm
