"""The families whose MTP layer can be trained, and a checkpoint of one as training reads it.

`checkpoint.families` says where the tensors lie; this adds what the layer computes with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.checkpoint.capabilities import missing_capability
from sglang_ascend.checkpoint.config import ModelConfig, read_config, refuse_remote_code
from sglang_ascend.checkpoint.errors import shown
from sglang_ascend.checkpoint.families import Family, find_family, mtp_prefix, target_tensors
from sglang_ascend.checkpoint.families import mtp_tensors as layer_tensors
from sglang_ascend.checkpoint.folder import has_tokenizer
from sglang_ascend.checkpoint.reader import TensorEntry, read_json_object
from sglang_ascend.checkpoint.shards import read_tensors
from sglang_ascend.checkpoint.tensors import (
    check_complete,
    check_shapes,
    missing_tensors,
    modules_of,
)
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.training.targets import llama
from sglang_ascend.training.targets.attention import ATTENTION, grouped_attention
from sglang_ascend.training.targets.device import CPU
from sglang_ascend.training.targets.indexed import indexed
from sglang_ascend.training.targets.quantized import Opened, load_model, refuse_untrainable

Tensor = torch.Tensor


@dataclass(frozen=True)
class Trainable:
    """What an MTP layer computes beside its decoder layer.

    Source: models/{mimo_mtp,deepseek_nextn,glm4_moe_nextn,glm4_moe_lite_nextn}.py of SGLang 0.5.23.

    Attributes:
        model_class: the class of transformers whose decoder layer the family uses.
        hidden_first: the order of the projection's two inputs, hidden state and embedding.
        drops_first_token: whether the embedding at position 0 is replaced by zeros.
    """

    model_class: str
    hidden_first: bool
    drops_first_token: bool


TRAINABLE = {
    "MiMoForCausalLM": Trainable("Qwen2ForCausalLM", hidden_first=True, drops_first_token=True),
    "DeepseekV3ForCausalLM": Trainable("DeepseekV3ForCausalLM", False, False),
    "Glm4MoeForCausalLM": Trainable("Glm4MoeForCausalLM", False, False),
    "Glm4MoeLiteForCausalLM": Trainable("Glm4MoeLiteForCausalLM", False, False),
}
# A model without an MTP layer, and the architecture that it is served as once it has one.
BECOMES = {"Qwen2ForCausalLM": "MiMoForCausalLM", llama.ARCHITECTURE: "MiMoForCausalLM"}


@dataclass(frozen=True)
class Target:
    """An opened checkpoint: its headers are read, its values when they are asked for.

    Attributes:
        config: by the names of `family`, whatever names the folder's own config.json has.
        is_llama: the folder lacks the biases of q, k and v, which are zero.
        device: where model, layer, embedding and head compute; what is read lies on the CPU.
    """

    folder: Path
    config: ModelConfig
    family: Family
    tensors: dict[str, TensorEntry]
    is_llama: bool = False
    device: torch.device = CPU

    @classmethod
    def open(
        cls, folder: Path, may_be_quantized: bool = False, device: torch.device = CPU
    ) -> Target:
        """Reads config.json and the safetensors headers in `folder`.

        A quantized one is read decoded, and its linears compute as they are served.

        Raises:
            CheckpointError: unreadable, quantized unless it may be, or of a family that is not in
                `TRAINABLE`.
        """
        config = read_config(folder)
        is_llama = config.architecture == llama.ARCHITECTURE
        if is_llama:
            config = llama.as_qwen2(config)
        config = replace(config, architecture=BECOMES.get(config.architecture, config.architecture))
        family = find_family(config)
        if family is None or family.architecture not in TRAINABLE:
            raise CheckpointError(
                f"{config.path} names {config.architecture}, whose MTP layer cannot be trained "
                f"here; pass a checkpoint of {', '.join([*BECOMES, *TRAINABLE])}"
            )
        if config.quantized and not may_be_quantized:
            raise CheckpointError(
                f"{folder} is quantized; pass the checkpoint that it was made from, in bf16"
            )
        return cls(folder, config, family, read_tensors(folder), is_llama, device)

    def check_whole(self) -> None:
        """Refuses a folder that lacks a tensor of the target or its tokenizer, or whose model is
        not served or cannot be built, before hours go by.

        Raises:
            CheckpointError: naming the first that is missing or of another shape, or the field of
                config.json.
        """
        served = replace(self.config, fields=self.served_config)
        if (what := missing_capability(served)) is not None:
            raise CheckpointError(
                f"{self.folder} needs {what}, which MTP does not serve; pass another target"
            )
        refuse_remote_code(served, self.family.model_types, trust_remote_code=False)
        if self.config.quantized:
            refuse_untrainable(self.quantized, self.is_llama, self.device)
        self.check_tensors()
        self.check_tokenizer()
        self.skeleton()

    def check_tensors(self) -> None:
        """Refuses a folder that lacks a tensor of the target.

        Raises:
            CheckpointError: naming the first that is missing or of another shape.
        """
        modules = modules_of(self.tensors) if self.config.quantized else frozenset[str]()
        zeros = {name for name, _ in llama.zero_biases(self.config)} if self.is_llama else set()
        every = target_tensors(self.family, self.config)
        parts = ([one for one in layer if one.name not in zeros] for layer in every)
        check_complete(shown(self.folder), parts, self.tensors, modules, self.config)

    def check_tokenizer(self) -> None:
        """Raises CheckpointError: there is none in the folder, or a damaged one."""
        if not has_tokenizer(self.folder):
            raise CheckpointError(
                f"{self.folder} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json "
                "with merges.txt); copy the one that the model was trained with into it"
            )
        for path in self.folder.glob("tokenizer*.json"):
            read_json_object(path)

    def check_own_layer(self) -> None:
        """Refuses an MTP layer that is not there, or not all of it, before hours go by.

        Raises:
            CheckpointError: naming the first tensor that is missing or of another shape.
        """
        expected = layer_tensors(self.family, self.config)
        modules = modules_of(self.tensors) if self.config.quantized else frozenset[str]()
        missing = missing_tensors(expected, self.tensors, modules)
        if not self.has_own_layer:
            raise CheckpointError(
                f"{self.folder} has no MTP layer; train one, and name what `train` wrote as --run"
            )
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {missing[0]} ({len(missing)} tensors of its MTP layer in "
                "all); copy the complete checkpoint again, or train a new layer (--init, or "
                "--from-scratch of `train`)"
            )
        check_shapes(expected, self.tensors, self.config)

    @property
    def trainable(self) -> Trainable:
        return TRAINABLE[self.family.architecture]

    @property
    def has_own_layer(self) -> bool:
        """Whether the folder holds any tensor of an MTP layer."""
        return any(name.startswith(self.mtp_prefix) for name in self.tensors)

    @property
    def mtp_prefix(self) -> str:
        """What the names of the MTP layer's tensors begin with, dot included."""
        return mtp_prefix(self.family, self.config)

    @property
    def served_config(self) -> dict[str, Any]:
        """config.json of the checkpoint with one MTP layer."""
        names = {"architectures": [self.family.architecture], "num_nextn_predict_layers": 1}
        return {**self.config.fields, **names}

    @cached_property
    def model_class(self) -> Any:
        import transformers

        transformers.AttentionInterface.register(ATTENTION, grouped_attention)
        return getattr(transformers, self.trainable.model_class)

    @cached_property
    def model_config(self) -> Any:
        """transformers' config, for attention and experts by plain PyTorch.

        Raises as `skeleton`.
        """
        with self._by_transformers():
            config = self.model_class.config_class.from_dict(dict(self.config.fields))
        config._attn_implementation, config._experts_implementation = ATTENTION, "eager"
        if kinds := getattr(config, "mlp_layer_types", None):  # of the MTP layer too
            config.mlp_layer_types = [*kinds, "sparse" if self.family.mtp_is_sparse else "dense"]
        return config

    def skeleton(self) -> Any:
        """transformers' model on the meta device, without MTP layers.

        Raises:
            CheckpointError: transformers makes none of config.json.
        """
        with self._by_transformers(), torch.device("meta"):
            return self.model_class(self.model_config)

    @contextmanager
    def _by_transformers(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each of its configs and models has its own
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{self.config.path} makes no {self.trainable.model_class} of transformers "
                f"({type(error).__name__}: {reason}); correct it"
            ) from None

    @cached_property
    def quantized(self) -> Checkpoint:
        """The folder as a quantized checkpoint, which it is."""
        return Checkpoint.open(self.folder)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors in fp32, on the CPU."""
        if self.config.quantized:
            return Opened(self.quantized).read(names)
        by_file = defaultdict(list)
        for name in names:
            if name not in self.tensors:
                raise CheckpointError(f"{self.folder} lacks {name}; copy the whole checkpoint")
            by_file[self.tensors[name].file].append(name)
        found = {}
        for path, held in by_file.items():
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name).float() for name in held}
        return found

    def mtp_tensors(self) -> dict[str, Tensor]:
        """The checkpoint's own MTP layer by full name; empty if it has none."""
        names = Opened(self.quantized).names() if self.config.quantized else self.tensors
        return self.read(name for name in names if name.startswith(self.mtp_prefix))

    def embedding_and_head(self) -> tuple[Tensor, Tensor]:
        """Both [vocabulary, hidden_size] on `device`; one tensor where they are tied."""
        tied = self.config.flag("tie_word_embeddings")
        names = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
        tensors = [tensor.to(self.device) for tensor in self.read(names).values()]
        return tensors[0], tensors[-1]

    def final_norm(self) -> Tensor:
        """[hidden_size] on `device`, the weight of the norm before the head."""
        return self.read(["model.norm.weight"])["model.norm.weight"].to(self.device)

    def load_model(self, dtype: torch.dtype = torch.float32) -> Any:
        """The model in `dtype` on `device` without MTP layers, for inference with an attention
        mask. A quantized one has its float parts in float32, whatever `dtype` says."""
        if self.config.quantized:
            return load_model(self.model_class, self.model_config, self.quantized)
        from transformers import logging

        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it would list the MTP layer's tensors as unexpected
        try:
            with indexed(self.folder, self.tensors) as folder:
                model = self.model_class.from_pretrained(
                    folder, config=self.model_config, dtype=dtype
                )
        finally:
            logging.set_verbosity(verbosity)
        if self.is_llama:
            for name, _ in llama.zero_biases(self.config):
                model.get_parameter(name).data.zero_()
        return model.to(self.device).eval().requires_grad_(False)
