"""config.json as typed, checked fields; it runs no code and builds no transformers class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ascend.checkpoint.errors import CheckpointError, shown, wrong_shape_of_json
from sglang_ascend.checkpoint.reader import read_json_object

MAX_DIMENSION = 2**31
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
QUANTIZATION_FILES = ("quant_model_description.json", "hf_quant_config.json")


@dataclass(frozen=True)
class ModelConfig:
    """The fields of one config.json; a missing or ill-typed field raises CheckpointError."""

    path: Path
    fields: Mapping[str, Any]
    architecture: str
    quantized: bool

    def size(self, name: str) -> int:
        """A positive integer field such as hidden_size."""
        return self._integer(name, minimum=1)

    def count(self, name: str) -> int:
        """An integer field that may be 0, such as first_k_dense_replace."""
        return self._integer(name, minimum=0)

    def optional_size(self, name: str) -> int | None:
        """A positive integer field that may be absent or null, such as head_dim."""
        return None if self.fields.get(name) is None else self.size(name)

    def nullable_count(self, name: str) -> int | None:
        """A field such as q_lora_rank, null or an integer; absent is an error, because
        transformers would put the default of the largest published model in its place."""
        if name not in self.fields:
            raise self._missing(name)
        return None if self.fields[name] is None else self.count(name)

    def require(self, name: str) -> None:
        """Of a field that SGLang reads without a default."""
        if name not in self.fields:
            raise self._missing(name)

    def flag(self, name: str) -> bool:
        """A boolean field; absent means false."""
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{shown(self.path)} has {name} = {shown(value)}; set it to true or false"
            )
        return value

    def text(self, name: str) -> str:
        """A string field such as model_type."""
        if name not in self.fields:
            raise self._missing(name)
        value = self.fields[name]
        if not isinstance(value, str):
            raise CheckpointError(f"{shown(self.path)} has {name} = {shown(value)}; set a string")
        return value

    def _integer(self, name: str, minimum: int) -> int:
        if name not in self.fields:
            raise self._missing(name)
        value = self.fields[name]
        if type(value) is not int or not minimum <= value < MAX_DIMENSION:
            raise CheckpointError(
                f"{shown(self.path)} has {name} = {shown(value)}; "
                f"set it to the integer that the model was built with (at least {minimum})"
            )
        return value

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{shown(self.path)} lacks {name}; add the value that the model was built with"
        )


def read_config(folder: Path) -> ModelConfig:
    """The checked config.json of `folder`.

    Raises:
        CheckpointError: config.json is missing, no JSON object, or names no architecture.
    """
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{shown(path)} is missing; pass the folder of a complete checkpoint")
    fields = read_json_object(path)
    architectures = fields.get("architectures")
    if (
        not isinstance(architectures, list)
        or not architectures
        or not all(isinstance(name, str) for name in architectures)
    ):
        raise wrong_shape_of_json(path, "a list of architectures")
    quantized = any(fields.get(name) for name in QUANTIZATION_FIELDS) or any(
        (folder / name).exists() for name in QUANTIZATION_FILES
    )
    return ModelConfig(path, fields, architectures[0], quantized)


def refuse_remote_code(
    config: ModelConfig, built_in_model_types: tuple[str, ...] | None, trust_remote_code: bool
) -> None:
    """Refuses a config whose model_type can only be built by Python files of the checkpoint.

    Published DeepSeek and GLM configs carry an `auto_map` although transformers has their classes:
    it is ignored. Of a family unknown here, for which `built_in_model_types` is None, only SGLang
    knows whether it needs them.

    Raises:
        CheckpointError: model_type is not one of `built_in_model_types`; or these are unknown,
            `auto_map` is there, and `trust_remote_code` would run it.
    """
    has_code = bool(config.fields.get("auto_map"))
    if built_in_model_types is None:
        if has_code and trust_remote_code:
            raise CheckpointError(
                f"{shown(config.path)} asks for remote code (auto_map); start without "
                "--trust-remote-code, and with a checkpoint of a built-in model_type"
            )
        return
    model_type = config.text("model_type")
    if model_type not in built_in_model_types:
        reason = "asks for remote code (auto_map)" if has_code else "needs a class of its own"
        raise CheckpointError(
            f"{shown(config.path)} {reason} for model_type {shown(model_type)}; "
            f'delete auto_map and set "model_type": "{built_in_model_types[0]}", '
            f"which builds {config.architecture} without it"
        )
