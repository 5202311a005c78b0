"""Compares the tensors that a checkpoint declares with those that its config.json calls for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.layers import Expected
from sglang_ascend.checkpoint.reader import PLAIN_FLOATS, TensorEntry


def missing_tensors(
    expected: Iterable[Expected],
    tensors: Mapping[str, TensorEntry],
    quantized_modules: frozenset[str],
) -> list[str]:
    """The names of the required tensors that the checkpoint lacks.

    A quantized module stores its weight under other names (qweight, weight_packed, ...), so any
    tensor of a module in `quantized_modules` counts.
    """
    return [
        e.name
        for e in expected
        if not e.optional
        and e.name not in tensors
        and e.fused_into not in tensors
        and e.name.rpartition(".")[0] not in quantized_modules
    ]


def check_shapes(
    expected: Iterable[Expected], tensors: Mapping[str, TensorEntry], config: ModelConfig
) -> None:
    """Refuses plain float tensors of another shape than config.json says.

    Packed or scaled tensors have shapes of their own, which only their format knows; they are
    refused when config.json does not say that the checkpoint is quantized.

    Raises:
        CheckpointError: naming the first tensor that differs, its file, and both shapes.
    """
    for e in expected:
        tensor = tensors.get(e.name)
        if tensor is None:
            continue
        if tensor.dtype not in PLAIN_FLOATS:
            _refuse_undeclared_format(tensor, config)
        elif tensor.shape != e.shape:
            raise CheckpointError(
                f"{shown(tensor.file)} holds {shown(e.name)} with shape {list(tensor.shape)} where "
                f"{shown(config.path)} calls for {list(e.shape)}; use the config.json and the "
                "weights of one and the same model"
            )


def check_complete(
    named: str,
    parts: Iterable[list[Expected]],
    tensors: Mapping[str, TensorEntry],
    quantized_modules: frozenset[str],
    config: ModelConfig,
) -> None:
    """Refuses a checkpoint, `named` so, that has not every tensor of `parts`, each in its shape.

    Raises:
        CheckpointError: naming the first that is missing or another.
    """
    for expected in parts:
        if missing := missing_tensors(expected, tensors, quantized_modules):
            raise CheckpointError(
                f"{named} lacks tensors that its config.json calls for (first {shown(missing[0])}, "
                f"{len(missing)} in that layer); copy or download the complete checkpoint again"
            )
        check_shapes(expected, tensors, config)


def modules_of(names: Iterable[str]) -> frozenset[str]:
    """Every dotted prefix of every name: the modules that own a tensor."""
    modules: set[str] = set()
    for name in names:
        module = name.rpartition(".")[0]
        while module and module not in modules:
            modules.add(module)
            module = module.rpartition(".")[0]
    return frozenset(modules)


def _refuse_undeclared_format(tensor: TensorEntry, config: ModelConfig) -> None:
    if not config.quantized:
        raise CheckpointError(
            f"{shown(tensor.file)} holds {shown(tensor.name)} as {tensor.dtype} although "
            f"{shown(config.path)} has no quantization_config; add it, or export the weights as "
            "BF16, F16 or F32"
        )
