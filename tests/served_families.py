"""Families that are served and not trained: random checkpoints, and what their MTP layers compute.

The names are those of published checkpoints, as SGLang 0.5.23 reads them (models/ernie4_eagle.py,
hunyuan_v3_nextn.py, qwen3_moe_mtp.py), and the layers transformers' own behind a projection. Of the
package nothing is used but the recursion, which tests/training compares with chains drafted one by
one.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from acceptance_oracle import AcceptanceOracle
from greedy_oracle import CLASSES
from safetensors.torch import load_file, save_file
from tiny_targets import SIZES, write_target
from torch import Tensor

from sglang_ascend.training.interface import ChainCache, chain_mask

LAYERS, WIDTH = SIZES["num_hidden_layers"], SIZES["hidden_size"]
# How a token's embedding weighs beside what the layers add to it: the next token often follows from
# the last one, which the MTP layer then drafts, and the state matters enough to be missed.
SPREAD, TOKEN_WEIGHT, STATE_WEIGHT = 0.3, 4.0, 0.5


@dataclass(frozen=True)
class Definition:
    """What the MTP layer's tensors are called, and what it computes with them."""

    projection: str
    token_norm: str
    hidden_norm: str
    final_norm: str | None  # None: the head reads the decoder layer's output as it is
    block: str
    copied_layer: int  # of the target, with experts or without as the MTP layer is
    alone: dict[str, object] = field(default_factory=dict)  # config of a model of the block alone
    drops_first_token: bool = False


BEHIND = f"model.layers.{LAYERS}."
DEFINITIONS = {
    "Ernie4_5_MoeForCausalLM": Definition(
        "model.mtp_linear_proj.0",
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        None,
        "model.mtp_block.0.",
        copied_layer=0,
        drops_first_token=True,
    ),
    "HYV3ForCausalLM": Definition(
        f"{BEHIND}eh_proj",
        f"{BEHIND}enorm",
        f"{BEHIND}hnorm",
        f"{BEHIND}final_layernorm",
        BEHIND,
        copied_layer=LAYERS - 1,
        alone={"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0},
    ),
    "Qwen3MoeForCausalLM": Definition(
        "mtp.fc",
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.norm",
        "mtp.layers.0.",
        copied_layer=LAYERS - 1,
    ),
}


def write_served(folder: Path, family: str) -> Path:
    """A random checkpoint of `family` with an MTP layer that is a copy of one of its layers, fed by
    the token as the target is, and by a bit of the state."""
    file = write_target(folder, family, initializer_range=SPREAD) / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            weight.normal_(0.0, 0.1, generator=generator)
    embedding = weights["model.embed_tokens.weight"]
    embedding *= TOKEN_WEIGHT
    mtp = DEFINITIONS[family]
    copied = f"model.layers.{mtp.copied_layer}."
    layer = {
        name.replace(copied, mtp.block): weight.clone()
        for name, weight in weights.items()
        if name.startswith(copied)
    }
    for norm in filter(None, (mtp.token_norm, mtp.hidden_norm, mtp.final_norm)):
        layer[f"{norm}.weight"] = 1 + 0.1 * torch.randn(WIDTH, generator=generator)
    token = embedding.float().square().mean().sqrt() * torch.eye(WIDTH)
    state = STATE_WEIGHT * torch.randn(WIDTH, WIDTH, generator=generator)
    layer[f"{mtp.projection}.weight"] = torch.cat((token, state), 1)
    dtype = embedding.dtype
    save_file(
        weights | {name: weight.to(dtype) for name, weight in layer.items()},
        file,
        metadata={"format": "pt"},
    )
    return folder


class DefinedLayer:
    """Implements `training.interface.ChainLayer`, in float32."""

    def __init__(self, folder: Path, mtp: Definition) -> None:
        self.mtp = mtp
        self.weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        config = json.loads((folder / "config.json").read_text())
        self.eps = config["rms_norm_eps"]
        with tempfile.TemporaryDirectory() as alone:
            model = _block_alone(Path(alone), config | mtp.alone, self.weights, mtp.block)
        self.block, self.rotary = model.layers[0], model.rotary_emb

    def __call__(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, cache: ChainCache
    ) -> Tensor:
        if self.mtp.drops_first_token:
            embeddings = embeddings * (positions != 0)[:, None]
        token = self._norm(embeddings, self.mtp.token_norm)
        pair = torch.cat((token, self._norm(hidden, self.mtp.hidden_norm)), -1)
        x = pair @ self.weights[f"{self.mtp.projection}.weight"].T
        rows = positions[None].expand(len(x), -1)
        x = self.block(
            x,
            attention_mask=chain_mask(x.shape[1], cache.step)[None, None],
            position_ids=rows,
            past_key_values=cache,
            position_embeddings=self.rotary(x, rows),
        )
        return x if self.mtp.final_norm is None else self._norm(x, self.mtp.final_norm)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


def _block_alone(folder: Path, config: dict, weights: dict[str, Tensor], block: str):
    """transformers' model of which the MTP layer's decoder layer is the only one."""
    outside = ("model.embed_tokens.", "model.norm.", "lm_head.")
    held = {name: w.clone() for name, w in weights.items() if name.startswith(outside)}
    held |= {
        name.replace(block, "model.layers.0."): w.clone()
        for name, w in weights.items()
        if name.startswith(block)
    }
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    model_class = CLASSES[config["model_type"]]
    return model_class.from_pretrained(folder, dtype=torch.float32).eval().model


class DefinedAcceptance(AcceptanceOracle):
    """As its base, with the MTP layer's definition from here."""

    def __init__(self, folder: Path, family: str, num_steps: int = 3) -> None:
        config = json.loads((folder / "config.json").read_text())
        model_class = CLASSES[config["model_type"]]
        model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.num_steps, self.model = num_steps, model.model
        self.layer = DefinedLayer(folder, DEFINITIONS[family])
        self.embedding, self.head = model.model.embed_tokens.weight, model.lm_head.weight
        self.drafted, self.reads_own_text = None, True
