"""One layer of a checkpoint at a time, with every expert's linear as a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.ptq.served import ServedLinear
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.targets.packs import Pack, packed


class Expert(nn.Module):
    """One gated MLP; its linears have the names that a checkpoint gives them."""

    def __init__(self, hidden: int, intermediate: int, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = act_fn

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class Experts(nn.ModuleList):
    """In place of transformers' stacked experts, which hooks and quantized linears cannot enter."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [rows, size]; the chosen experts and their weights [rows, k]."""
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            rows, place = (top_k_index == number).nonzero(as_tuple=True)
            if len(rows):
                total.index_add_(0, rows, expert(hidden[rows]) * top_k_weights[rows, place, None])
        return total


def separate_experts(layer: nn.Module) -> None:
    """Replaces every stacked `experts` of `layer`; the new weights are on the meta device."""
    for parent in list(layer.modules()):
        stacked = getattr(parent, "experts", None)
        if stacked is None or not hasattr(stacked, "gate_up_proj"):
            continue
        num_experts, double, hidden = stacked.gate_up_proj.shape
        with torch.device("meta"):
            parts = [Expert(hidden, double // 2, stacked.act_fn) for _ in range(num_experts)]
        parent.experts = Experts(parts)


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Name and module of every float linear; a router is none."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            yield name, child


def fill(module: nn.Module, weights: Weights, checkpoint_name: Callable[[str], str]) -> None:
    """Reads all of `module` in float32, a quantized linear in its place as `ServedLinear`."""
    for name, linear in list(linears(module)):
        quantized = weights.quantized(checkpoint_name(f"{name}.weight").removesuffix(".weight"))
        if quantized is None:
            continue
        bias = None
        if linear.bias is not None:
            own = checkpoint_name(f"{name}.bias")
            bias = weights.read([own])[own]
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, ServedLinear(quantized, bias))
    names = {name: checkpoint_name(name) for name in module.state_dict()}
    held = weights.read(names.values())
    module.load_state_dict({name: held[own] for name, own in names.items()}, assign=True)
    module.eval().requires_grad_(False)


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
        with torch.device("meta"):
            model = target.model_class(config).model
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
        if quantized := self.weights.quantized("lm_head"):
            return ServedLinear(quantized, None)
        return lambda hidden: F.linear(hidden, head)

    def final_norm(self) -> nn.Module:
        config = self.target.model_config
        norm = self._norm(config.hidden_size, eps=config.rms_norm_eps)
        fill(norm, self.weights, lambda name: f"model.norm.{name}")
        return norm
