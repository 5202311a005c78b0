"""SGLang's loader over a quantized checkpoint: which methods its layers get, and their tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_model

from sglang_ascend.checkpoint.families import find_family, mtp_prefix
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.quantization.experts import QuantizedExperts
from sglang_ascend.plugin.quantization.head import QuantizedHead
from sglang_ascend.plugin.quantization.linear import QuantizedLinear
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts import says_quantized
from sglang_ascend.quantization.product import is_decoded
from sglang_ascend.quantization.rows import to_rows
from sglang_ascend.quantization.weight import HEAD

# What SGLang's models concatenate, tensor by tensor, before a layer is given them.
CONCATENATED = {"q_a_proj": "kv_a_proj_with_mqa", "kv_a_proj_with_mqa": "q_a_proj"}

logger = logging.getLogger(__name__)


class ServedQuantization(QuantizationConfig):
    """Every linear and every expert takes what its tensors say, float or quantized, so that no
    name has to be known: SGLang's models find the place of each tensor.

    Args:
        has_head: the checkpoint has a quantized head, and the model does not share another's.
    """

    def __init__(self, has_head: bool = False) -> None:
        super().__init__()
        self.has_head = has_head

    def get_name(self) -> str:
        return "sglang_ascend"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServedQuantization:
        return cls()

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return QuantizedExperts(prefix)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if is_decoded(prefix) else QuantizedLinear(prefix)
        if isinstance(layer, ParallelLMHead) and self.has_head:
            return QuantizedHead(prefix)
        return None


def served_config(original: Callable[..., Any], model_config: Any, load_config: Any) -> Any:
    """Around SGLang's choice of a quantization method, of the target and of the draft."""
    checkpoint = None if asks_for_core() else quantized_checkpoint(model_config.model_path)
    if checkpoint is None:
        return original(model_config, load_config)
    return ServedQuantization(HEAD in checkpoint.schemes and not model_config.is_draft_model)


def asks_for_core() -> bool:
    """Whether ``--quantization`` names a method of SGLang's own, on a device that has them."""
    return device_profile().has_core_quantization and get_model().quantization is not None


def weights_of(
    original: Callable[..., Iterator[tuple[str, torch.Tensor]]],
    self: Any,
    source: Any,
    *,
    resolved_source: Any = None,
    startup_prefetch_started: bool = False,
    startup_prefetch_active: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Around SGLang's iterator over the tensors of a checkpoint."""
    checkpoint = None if asks_for_core() else quantized_checkpoint(source.model_or_path)
    if checkpoint is not None:
        is_draft = source.model_config is not None and source.model_config.is_draft_model
        return _tensors(checkpoint, _prefix(checkpoint, is_draft))
    return original(
        self,
        source,
        resolved_source=resolved_source,
        startup_prefetch_started=startup_prefetch_started,
        startup_prefetch_active=startup_prefetch_active,
    )


def quantized_checkpoint(folder: str) -> Checkpoint | None:
    """The checkpoint in ``folder``; None if it is float, or no folder of this machine.

    Raises:
        CheckpointError: its quantization cannot be read.
    """
    path = Path(folder)
    if not says_quantized(path):
        return None
    return _opened(path, tuple((f.name, f.stat().st_mtime_ns) for f in sorted(path.iterdir())))


@lru_cache(maxsize=1)
def _opened(path: Path, _files: tuple[tuple[str, int], ...]) -> Checkpoint | None:
    """Opened anew when a file changes, as before an update of the weights."""
    checkpoint = Checkpoint.open(path)
    if not checkpoint.schemes:
        return None
    _announce(checkpoint)
    return checkpoint


def _announce(checkpoint: Checkpoint) -> None:
    schemes = [scheme.name for scheme in checkpoint.schemes.values()]
    counts = ", ".join(f"{schemes.count(name)} of {name}" for name in dict.fromkeys(schemes))
    decoded = sum(is_decoded(module) for module in checkpoint.schemes)
    note = f"; {decoded} of them are multiplied as floats" if decoded else ""
    logger.info("Quantized linears (%s): %s%s.", checkpoint.layout.name, counts, note)


def _prefix(checkpoint: Checkpoint, is_draft: bool) -> str:
    """Of the quantized modules that a model takes: a draft shares all but its own layer."""
    family = find_family(checkpoint.config)
    return mtp_prefix(family, checkpoint.config) if is_draft and family is not None else ""


def _tensors(checkpoint: Checkpoint, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Float tensors as they are; a quantized module as one tensor of rows, named as its weight."""
    for name in checkpoint.float_names():
        if not checkpoint.layout.is_own(name):
            yield name, checkpoint.tensor(name)
    for module in checkpoint.schemes:
        if not module.startswith(prefix):
            continue
        weight = checkpoint.weight(module)
        is_float = is_decoded(module) or _meets_float(checkpoint, module)
        yield f"{module}.weight", weight.dequantize() if is_float else to_rows(weight)


def _meets_float(checkpoint: Checkpoint, module: str) -> bool:
    """Whether SGLang concatenates it with a float weight, which rows of bytes cannot be."""
    stem, _, name = module.rpartition(".")
    other = f"{stem}.{CONCATENATED.get(name)}"
    if other in checkpoint.schemes or f"{other}.weight" not in checkpoint.entries:
        return False
    logger.warning("%s is concatenated with a float weight; it is multiplied as float.", module)
    return True
