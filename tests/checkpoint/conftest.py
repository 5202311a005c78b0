"""Tiny checkpoints of each family, written by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_shapes import (
    DEEPSEEK_ATTENTION,
    DEEPSEEK_CONFIG,
    DEEPSEEK_DENSE,
    DEEPSEEK_EXPERTS,
    DEEPSEEK_OUTSIDE,
    ERNIE_ATTENTION,
    ERNIE_CONFIG,
    ERNIE_EXPERTS,
    ERNIE_MTP,
    GLM_ATTENTION,
    GLM_CONFIG,
    HUNYUAN_ATTENTION,
    HUNYUAN_CONFIG,
    HUNYUAN_EXPERTS,
    HUNYUAN_NEXTN,
    MIMO_CONFIG,
    MIMO_LAYER,
    MIMO_MTP,
    MIMO_OUTSIDE,
    NEXTN,
    QWEN3_CONFIG,
    QWEN3_LAYER,
    QWEN3_MTP,
    Shapes,
)

BODY_SHARD = "model-00001-of-00002.safetensors"
MTP_SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


class TinyCheckpoint:
    """A two-shard checkpoint: change `config` or `tensors` and save again, or damage its files."""

    def __init__(self, folder: Path, config: dict[str, Any], body: Shapes, mtp: Shapes) -> None:
        folder.mkdir()
        generator = torch.Generator().manual_seed(0)
        self.folder = folder
        self.config = dict(config)
        self.mtp_names = list(mtp)
        self.tensors = {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in {**body, **mtp}.items()
        }
        self.save()

    def save(self) -> None:
        shard_of = {n: MTP_SHARD if n in self.mtp_names else BODY_SHARD for n in self.tensors}
        for shard in (BODY_SHARD, MTP_SHARD):
            held = {n: t for n, t in self.tensors.items() if shard_of[n] == shard}
            if held:
                save_file(held, self.folder / shard)
        self.write_json(INDEX, {"metadata": {}, "weight_map": shard_of})
        self.write_json("config.json", self.config)
        self.write_json("tokenizer.json", {"model": {"vocab": {}}})

    def write_json(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value), encoding="utf-8")

    def edit_bytes(self, name: str, edit: Callable[[bytes], bytes]) -> None:
        path = self.folder / name
        path.write_bytes(edit(path.read_bytes()))

    def edit_index(self, edit: Callable[[dict[str, str]], object]) -> None:
        index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        edit(index["weight_map"])
        self.write_json(INDEX, index)


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _build_mimo(folder: Path) -> TinyCheckpoint:
    body = {
        **MIMO_OUTSIDE,
        **_under("model.layers.0", MIMO_LAYER),
        **_under("model.layers.1", MIMO_LAYER),
    }
    mtp = _under("model.mtp_layers.0", {**MIMO_MTP, **MIMO_LAYER})
    return TinyCheckpoint(folder, MIMO_CONFIG, body, mtp)


def _build_deepseek(folder: Path) -> TinyCheckpoint:
    body = {
        **DEEPSEEK_OUTSIDE,
        **_under("model.layers.0", {**DEEPSEEK_ATTENTION, **DEEPSEEK_DENSE}),
        **_under("model.layers.1", {**DEEPSEEK_ATTENTION, **DEEPSEEK_EXPERTS}),
    }
    mtp = _under("model.layers.2", {**NEXTN, **DEEPSEEK_ATTENTION, **DEEPSEEK_EXPERTS})
    return TinyCheckpoint(folder, DEEPSEEK_CONFIG, body, mtp)


def _build_glm(folder: Path) -> TinyCheckpoint:
    body = {
        **DEEPSEEK_OUTSIDE,
        **_under("model.layers.0", {**GLM_ATTENTION, **DEEPSEEK_DENSE}),
        **_under("model.layers.1", {**GLM_ATTENTION, **DEEPSEEK_EXPERTS}),
    }
    mtp = _under("model.layers.2", {**NEXTN, **GLM_ATTENTION, **DEEPSEEK_EXPERTS})
    return TinyCheckpoint(folder, GLM_CONFIG, body, mtp)


def _build_ernie(folder: Path) -> TinyCheckpoint:
    body = {
        "model.embed_tokens.weight": (60, 32),
        "model.norm.weight": (32,),
        **_under("model.layers.0", {**ERNIE_ATTENTION, **DEEPSEEK_DENSE}),
        **_under("model.layers.1", {**ERNIE_ATTENTION, **ERNIE_EXPERTS}),
    }
    mtp = {**ERNIE_MTP, **_under("model.mtp_block.0", {**ERNIE_ATTENTION, **DEEPSEEK_DENSE})}
    return TinyCheckpoint(folder, ERNIE_CONFIG, body, mtp)


def _build_hunyuan(folder: Path) -> TinyCheckpoint:
    body = {
        **DEEPSEEK_OUTSIDE,
        **_under("model.layers.0", {**HUNYUAN_ATTENTION, **DEEPSEEK_DENSE}),
        **_under("model.layers.1", {**HUNYUAN_ATTENTION, **HUNYUAN_EXPERTS}),
    }
    mtp = _under("model.layers.2", {**HUNYUAN_NEXTN, **HUNYUAN_ATTENTION, **HUNYUAN_EXPERTS})
    return TinyCheckpoint(folder, HUNYUAN_CONFIG, body, mtp)


def _build_qwen3(folder: Path) -> TinyCheckpoint:
    body = {
        **DEEPSEEK_OUTSIDE,
        **_under("model.layers.0", QWEN3_LAYER),
        **_under("model.layers.1", QWEN3_LAYER),
    }
    mtp = {**_under("mtp", QWEN3_MTP), **_under("mtp.layers.0", QWEN3_LAYER)}
    return TinyCheckpoint(folder, QWEN3_CONFIG, body, mtp)


BUILDERS = {
    "mimo": _build_mimo,
    "deepseek": _build_deepseek,
    "glm4_moe": _build_glm,
    "ernie": _build_ernie,
    "hunyuan": _build_hunyuan,
    "qwen3_moe": _build_qwen3,
}


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., TinyCheckpoint]:
    """build(family, name="model") writes a whole, valid checkpoint into a fresh folder."""

    def build_checkpoint(family: str, name: str = "model") -> TinyCheckpoint:
        return BUILDERS[family](tmp_path / name)

    return build_checkpoint
