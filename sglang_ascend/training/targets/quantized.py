"""A quantized target in transformers' model: its linears are the products that serving runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.block_fp8 import BlockFp8
from sglang_ascend.quantization.layouts.compressed_tensors import CompressedTensors
from sglang_ascend.quantization.layouts.modelslim import ModelSlim
from sglang_ascend.quantization.product import Product, prepare
from sglang_ascend.quantization.weight import HEAD

WRITTEN = (ModelSlim, CompressedTensors, BlockFp8)  # layouts that an export can write again
EMBEDDING = "model.embed_tokens"


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


class ServedLinear(nn.Module):
    """In place of `nn.Linear`."""

    def __init__(self, product: Product, bias: Tensor | None) -> None:
        super().__init__()
        self._product, self._bias = product, bias

    def forward(self, inputs: Tensor) -> Tensor:
        return self._product(inputs, self._bias)


class Opened:
    """The weights of a checkpoint, for `fill`; quantized ones may be read too, decoded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def product(self, module: str) -> Product | None:
        """Of a quantized linear, None of a float one."""
        is_quantized = module in self.checkpoint.schemes
        return prepare(self.checkpoint.weight(module)) if is_quantized else None

    def names(self) -> Iterator[str]:
        """What `read` takes."""
        yield from self.checkpoint.float_names()
        yield from (f"{module}.weight" for module in self.checkpoint.schemes)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors in float32.

        Raises:
            CheckpointError: one is missing.
        """
        return {name: self._tensor(name) for name in names}

    def _tensor(self, name: str) -> Tensor:
        if (module := name.removesuffix(".weight")) in self.checkpoint.schemes:
            return self.checkpoint.weight(module).dequantize()
        if name not in self.checkpoint.entries:
            raise CheckpointError(
                f"{shown(self.checkpoint.folder)} lacks {shown(name)}; pass a complete checkpoint "
                "with one tensor for each expert and projection"
            )
        return self.checkpoint.tensor(name).float()


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Name and module of every float linear; a router is none."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear):
            yield name, child


def fill(module: nn.Module, weights: Opened, checkpoint_name: Callable[[str], str]) -> None:
    """Reads all of `module` in float32, a quantized linear in its place as `ServedLinear`."""
    for name, linear in list(linears(module)):
        product = weights.product(checkpoint_name(f"{name}.weight").removesuffix(".weight"))
        if product is None:
            continue
        bias = None
        if linear.bias is not None:
            own = checkpoint_name(f"{name}.bias")
            bias = weights.read([own])[own]
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, ServedLinear(product, bias))
    names = {name: checkpoint_name(name) for name in module.state_dict()}
    held = weights.read(names.values())
    module.load_state_dict({name: held[own] for name, own in names.items()}, assign=True)
    module.eval().requires_grad_(False)


def load_model(model_class: Any, config: Any, checkpoint: Checkpoint) -> Any:
    """transformers' model over `checkpoint`, float parts in float32, inputs rounded as served."""
    with torch.device("meta"):
        model = model_class(deepcopy(config))  # its attention may be set to another
    separate_experts(model)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    tied = checkpoint.config.flag("tie_word_embeddings")

    def checkpoint_name(name: str) -> str:
        return name.replace(HEAD, EMBEDDING) if tied else name

    fill(model, Opened(checkpoint), checkpoint_name)
    return model


def refuse_untrainable(checkpoint: Checkpoint, is_llama: bool, device: torch.device) -> None:
    """Of a checkpoint whose MTP layer is to be trained.

    Raises:
        CheckpointError: its layout cannot be written, or `device` is no CPU.
    """
    folder = checkpoint.folder
    if not isinstance(checkpoint.layout, WRITTEN) or is_llama:
        raise CheckpointError(
            f"{shown(folder)} is quantized as {checkpoint.layout.name}, which no layer is joined "
            "to here; convert it to modelslim or compressed-tensors, a Llama before quantization"
        )
    if device.type != "cpu":
        raise CheckpointError(
            f"{shown(folder)} is quantized and computes on the CPU only here; pass --device cpu"
        )
