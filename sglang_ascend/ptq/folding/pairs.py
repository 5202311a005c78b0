"""Which weights of a decoder layer make a linear's inputs, channel by channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["norm-linear", "ov", "up-down"]

# By norm, the linears that read it; behind the second half of a layer comes an MLP or its experts.
_NORMS = {
    "input_layernorm": tuple(
        f"self_attn.{name}"
        for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
    ),
    "self_attn.q_a_layernorm": ("self_attn.q_b_proj",),
    "self_attn.kv_a_layernorm": ("self_attn.kv_b_proj",),
}


@dataclass(frozen=True)
class Pair:
    """`producer` makes the inputs of `readers`; all names are of a layer's modules.

    Attributes:
        rows: int64 [in]: the producer's row of each input channel.
        router: reads the same inputs, is never quantized, and is scaled with the readers.
    """

    kind: Kind
    producer: str
    readers: tuple[str, ...]
    rows: Tensor
    router: str | None = None

    @property
    def name(self) -> str:
        return f"{self.producer}|{self.kind}"


def pairs(shapes: Mapping[str, torch.Size], config: Any) -> list[Pair]:
    """Of a layer whose tensors have these `shapes`, and transformers' config of the model."""
    return [*_norm_linear(shapes), *_ov(shapes, config), *_up_down(shapes)]


def _columns(shapes: Mapping[str, torch.Size], module: str) -> Tensor:
    return torch.arange(shapes[f"{module}.weight"][-1])


def _norm_linear(shapes: Mapping[str, torch.Size]) -> Iterator[Pair]:
    for norm, known in _NORMS.items():
        readers = tuple(name for name in known if f"{name}.weight" in shapes)
        if norm == "input_layernorm" and "self_attn.q_b_proj.weight" in shapes:
            readers = tuple(name for name in readers if name != "self_attn.q_proj")
        if f"{norm}.weight" in shapes and readers:
            yield Pair("norm-linear", norm, readers, _columns(shapes, norm))
    norm = "post_attention_layernorm"
    readers = tuple(
        name.removesuffix(".weight")
        for name in shapes
        if name.startswith("mlp.") and name.endswith(("gate_proj.weight", "up_proj.weight"))
    )
    router = "mlp.gate" if "mlp.gate.weight" in shapes else None
    yield Pair("norm-linear", norm, readers, _columns(shapes, norm), router)


def _ov(shapes: Mapping[str, torch.Size], config: Any) -> Iterator[Pair]:
    """Head by head: a value channel is read by every query head of its group."""
    heads, reader = config.num_attention_heads, "self_attn.o_proj"
    size = shapes[f"{reader}.weight"][1] // heads
    head, channel = torch.arange(heads * size) // size, torch.arange(heads * size) % size
    if "self_attn.v_proj.weight" in shapes:
        group = heads // config.num_key_value_heads
        yield Pair("ov", "self_attn.v_proj", (reader,), head // group * size + channel)
    elif "self_attn.kv_b_proj.weight" in shapes:  # a head's keys without rotation, then its values
        keys = shapes["self_attn.kv_b_proj.weight"][0] // heads - size
        rows = head * (keys + size) + keys + channel
        yield Pair("ov", "self_attn.kv_b_proj", (reader,), rows)


def _up_down(shapes: Mapping[str, torch.Size]) -> Iterator[Pair]:
    for name in shapes:
        if name.startswith("mlp.") and name.endswith("up_proj.weight"):
            place = name.removesuffix("up_proj.weight")
            rows = torch.arange(shapes[name][0])
            yield Pair("up-down", f"{place}up_proj", (f"{place}down_proj",), rows)
