"""AWQ (AutoAWQ, version "gemm"): unsigned 4-bit codes packed along the output, eight interleaved.

For n inputs and m outputs: qweight int32 [n, m / 8], qzeros int32 [groups, m / 8], scales
[groups, m]. Nibble i of a word, from the lowest, is output ORDER[i] of its eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_ascend.checkpoint.reader import TensorEntry
from sglang_ascend.quantization.formats import INT4
from sglang_ascend.quantization.layouts.base import (
    ModuleTensors,
    Scheme,
    SettingError,
    UniformLayout,
    integer_setting,
    spread_groups,
)
from sglang_ascend.quantization.layouts.packing import unpack_words
from sglang_ascend.quantization.weight import QuantizedWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
HALF = 8


class Awq(UniformLayout):
    name: ClassVar[str] = "awq"

    def __init__(self, entries: Mapping[str, TensorEntry], settings: Mapping[str, Any]) -> None:
        super().__init__(entries)
        integer_setting(settings, "bits", 4)
        group_size = integer_setting(settings, "group_size")
        for name, known in (("version", "gemm"), ("zero_point", True)):
            value = settings.get(name, known)
            if (value.lower() if isinstance(value, str) else value) != known:
                raise SettingError(name, value, str(known))
        self._scheme = Scheme(
            "W4A16 awq",
            INT4,
            ("qweight", "qzeros", "scales"),
            group_size=None if group_size == -1 else group_size,
        )

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        if self.scheme(module) is None:
            return super().read(module, tensors)
        held = ModuleTensors(module, tensors)
        qweight = held.take("qweight", (torch.int32,), None, None)
        in_features, words = qweight.shape
        num_groups = spread_groups(in_features, self._scheme.group_size)
        qzeros = held.take("qzeros", (torch.int32,), num_groups, words)
        scale = held.scale("scales", num_groups, words * len(ORDER))
        return QuantizedWeight(
            codes=_unpack(qweight).to(torch.int8),
            scale=scale.T.contiguous(),
            zero=_unpack(qzeros).to(torch.int32),
            block=(1, self._scheme.group_size or in_features),
            number_format=INT4,
        )


def _unpack(words: Tensor) -> Tensor:
    """int32 [n, m / 8] as signed codes [m, n]."""
    nibbles = unpack_words(words, 4, 1).unflatten(1, (-1, len(ORDER)))
    ordered = nibbles[..., torch.tensor(ORDER).argsort()]
    return (ordered.flatten(1) - HALF).T.contiguous()
