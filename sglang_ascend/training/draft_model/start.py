"""What a draft model is before it is trained: a small checkpoint, or some layers of the target."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.checkpoint.config import read_config
from sglang_ascend.checkpoint.draft_model import validate_draft_model
from sglang_ascend.checkpoint.draft_model.vocabulary import num_tokens, tokenizer_file
from sglang_ascend.checkpoint.errors import shown
from sglang_ascend.checkpoint.shards import read_tensors
from sglang_ascend.training.targets.families import Target

Tensor = torch.Tensor
# A target's architecture, and that of a draft made of its layers.
LAYERS_OF = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class DraftStart:
    """A checkpoint in the making.

    Attributes:
        folder: where its tensors and its tokenizer are read.
        fields: its config.json.
        chosen: which layers of ``folder`` are its own, in order; None for all.
    """

    folder: Path
    fields: dict[str, Any]
    chosen: tuple[int, ...] | None = None

    @cached_property
    def config(self) -> Any:
        """transformers', for attention by plain PyTorch."""
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[self.fields["model_type"]].from_dict(dict(self.fields))
        config._attn_implementation, config.use_cache = "sdpa", False
        return config

    @property
    def num_tokens(self) -> int:
        """Ids that are tokens: rows of the head behind them are padding."""
        return min(num_tokens(tokenizer_file(self.folder)), self.fields["vocab_size"])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors of the draft in fp32, on the CPU.

        Raises:
            CheckpointError: one of them is not there.
        """
        tensors, by_file = read_tensors(self.folder), defaultdict(list)
        for name in names:
            source = _LAYER.sub(self._layer_of, name)
            if source not in tensors:
                raise CheckpointError(f"{shown(self.folder)} lacks {source}; copy it whole")
            by_file[tensors[source].file].append((name, source))
        found = {}
        for path, held in by_file.items():
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(source).float() for name, source in held}
        return found

    def embedding_and_head(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both [vocab_size, hidden_size] on ``device``; one tensor where they are tied."""
        tensors = [tensor.to(device) for tensor in self.read(self.outside).values()]
        return tensors[0], tensors[-1]

    @property
    def outside(self) -> list[str]:
        """What is not trained."""
        return [EMBEDDING] if self.config.tie_word_embeddings else [EMBEDDING, HEAD]

    def _layer_of(self, match: re.Match[str]) -> str:
        return match[0] if self.chosen is None else str(self.chosen[int(match[0])])


def given_model(target: Target, folder: Path) -> DraftStart:
    """The model in ``folder``. Raises CheckpointError: it could not draft for ``target``."""
    validate_draft_model(target.folder, folder)
    return DraftStart(folder, dict(read_config(folder).fields))


def some_layers(target: Target, num_layers: int) -> DraftStart:
    """``num_layers`` of the target's, the first, the last and evenly spaced ones between, with its
    embedding, last norm and head.

    Raises:
        CheckpointError: they make no model that SGLang serves as a draft.
        ValueError: the target has not more layers than these.
    """
    config = read_config(target.folder)
    if config.architecture not in LAYERS_OF or config.quantized:
        kind = "is quantized" if config.quantized else f"is a {shown(config.architecture)}"
        raise CheckpointError(
            f"{shown(target.folder)} {kind}, and drafts are made of layers of "
            f"{', '.join(LAYERS_OF)}, in floats; pass a small model of its tokenizer as --draft"
        )
    tokenizer_file(target.folder)
    has = config.size("num_hidden_layers")
    if not 1 <= num_layers < has:
        raise ValueError(f"--init-layers must be between 1 and {has - 1}, got {num_layers}.")
    spaces = max(1, num_layers - 1)
    chosen = tuple(round(i * (has - 1) / spaces) for i in range(num_layers))
    fields = {name: v for name, v in config.fields.items() if name != "num_nextn_predict_layers"}
    fields |= {"architectures": [LAYERS_OF[config.architecture]], "num_hidden_layers": num_layers}
    if isinstance(kinds := fields.get("layer_types"), list):
        fields["layer_types"] = [kinds[i] for i in chosen]
    return DraftStart(target.folder, fields, chosen)
