"""Patched, SGLang's GPTQ kernel for NPU hands torch_npu an offset that, added, decodes the weight.

GPTQ's definition is the oracle: value = (code - zero) * scale, codes and zeros packed into int32,
of version 1 with zeros less one. Unpatched, a weight whose zeros are not the middle is decoded
wrongly; a symmetric one is not, which is why it went unseen.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Optional

import pytest
import torch
from patch_set import cut_out, site_packages

IN, OUT, BITS = 8, 8, 8
PATH = "sglang/srt/hardware_backend/npu/quantization/gptq_kernels.py"


def packed(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Four bytes to an int32 along ``dim``, the first lowest."""
    parts = values.long().unflatten(dim, (-1, 4)).movedim(dim + 1, 0)
    words = sum(part << 8 * i for i, part in enumerate(parts))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def layer_of(codes: torch.Tensor, zeros: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        qweight=SimpleNamespace(data=packed(codes, 0)),
        qzeros=SimpleNamespace(data=packed(zeros - 1, 1)),
        scales=torch.ones(1, OUT),
    )


def decodes(kernel_of, codes: torch.Tensor, zeros: torch.Tensor) -> bool:
    config = SimpleNamespace(weight_bits=BITS, group_size=IN, checkpoint_format="gptq")
    layer = layer_of(codes, zeros)
    kernel_of(config).process_weights_after_loading(layer)
    added = layer.qweight.float() + layer.qzeros.float()
    return torch.equal(added, (codes - zeros).float())


@pytest.mark.sglang
def test_0029_passes_an_offset_that_decodes_when_it_is_added(patched):
    source = (site_packages() / PATH).read_text(encoding="utf-8")
    names = {"torch": torch, "Optional": Optional}
    names["unpack_from_int32"] = cut_out(source, "unpack_from_int32", dict(names))
    theirs = patched("0029", "GPTQLinearAscendKernel", **names)
    before = cut_out(source, "GPTQLinearAscendKernel", dict(names))
    codes = torch.randint(256, (IN, OUT), generator=torch.Generator().manual_seed(0))
    asymmetric, middle = torch.arange(100, 100 + OUT)[None], torch.full((1, OUT), 128)
    assert decodes(theirs, codes, asymmetric) and decodes(theirs, codes, middle)
    assert not decodes(before, codes, asymmetric) and decodes(before, codes, middle)
