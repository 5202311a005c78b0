"""GPTQ (AutoGPTQ, GPTQModel): unsigned codes packed along the input, a scale for a group of inputs.

For `bits` b, n inputs and m outputs: qweight int32 [ceil(n b / 32), m], qzeros int32
[groups, ceil(m b / 32)], scales [groups, m], g_idx int32 [n], the group of each input. The first
version of the format stores zero points less one, modulo 2**b, so that a zero point of 0 is stored
as 2**b - 1; checkpoint_format "gptq_v2" stores them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_ascend.checkpoint.reader import TensorEntry
from sglang_ascend.quantization.formats import FORMATS
from sglang_ascend.quantization.layouts.base import (
    ModuleTensors,
    Scheme,
    SettingError,
    UniformLayout,
    integer_setting,
    spread_groups,
)
from sglang_ascend.quantization.layouts.packing import WORD_BITS, unpack_words
from sglang_ascend.quantization.weight import QuantizedWeight

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


class Gptq(UniformLayout):
    name: ClassVar[str] = "gptq"

    def __init__(self, entries: Mapping[str, TensorEntry], settings: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._bits = integer_setting(settings, "bits", 2, 4, 8)
        group_size = integer_setting(settings, "group_size")
        version = settings.get("checkpoint_format", "gptq")
        if not isinstance(version, str) or version not in ZERO_OFFSETS:
            raise SettingError("checkpoint_format", version, " or ".join(ZERO_OFFSETS))
        dynamic = settings.get("dynamic") or {}
        # A rule that begins with - only leaves modules float, which their tensors show.
        if not isinstance(dynamic, dict) or not all(rule.startswith("-") for rule in dynamic):
            raise SettingError("dynamic", dynamic, "no setting of single modules")
        self._zero_offset = ZERO_OFFSETS[version]
        self._scheme = Scheme(
            f"W{self._bits}A16 gptq",
            FORMATS[f"int{self._bits}"],
            ("qweight", "qzeros", "scales"),
            ("g_idx",),
            group_size=None if group_size == -1 else group_size,
        )

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        if self.scheme(module) is None:
            return super().read(module, tensors)
        held = ModuleTensors(module, tensors)
        bits, per_word = self._bits, WORD_BITS // self._bits
        qweight = held.take("qweight", (torch.int32,), None, None)
        in_features, out_features = qweight.shape[0] * per_word, qweight.shape[1]
        group_index = None
        if held.has("g_idx"):  # its length is exact where the last word is not full
            group_index = held.take("g_idx", (torch.int32, torch.int64), None).to(torch.int64)
            if -(-len(group_index) // per_word) != qweight.shape[0]:
                raise held.error("g_idx", f"has {len(group_index)} groups for {in_features} inputs")
            in_features = len(group_index)
        num_groups = spread_groups(in_features, self._scheme.group_size)
        scale = held.scale("scales", num_groups, out_features)
        words = -(-out_features // per_word)
        qzeros = held.take("qzeros", (torch.int32,), num_groups, words)
        half = 1 << (bits - 1)
        zero = unpack_words(qzeros, bits, 1)[:, :out_features].to(torch.int32)
        zero = ((zero + self._zero_offset) & ((1 << bits) - 1)) - half
        codes = unpack_words(qweight, bits, 0)[:in_features] - half
        return QuantizedWeight(
            codes=codes.to(torch.int8).T.contiguous(),
            scale=scale.T.contiguous(),
            zero=zero.T.contiguous(),
            block=(1, self._scheme.group_size or in_features),
            number_format=self._scheme.number_format,
            group_index=self._any_order(held, group_index, in_features, num_groups),
        )

    def _any_order(
        self, held: ModuleTensors, group_index: Tensor | None, num_columns: int, num_groups: int
    ) -> Tensor | None:
        """None where the groups follow each other."""
        if group_index is None:
            return None
        if bool(((group_index < 0) | (group_index >= num_groups)).any()):
            raise held.error("g_idx", f"names a group outside of the {num_groups} that there are")
        plain = torch.arange(num_columns) // (self._scheme.group_size or num_columns)
        return None if torch.equal(group_index, plain) else group_index
