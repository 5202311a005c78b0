"""The layouts that can be written."""

from __future__ import annotations

from sglang_ascend.quantization.layouts import Layout
from sglang_ascend.quantization.layouts.modelslim import ModelSlim
from sglang_ascend.quantization.writers.base import Writer
from sglang_ascend.quantization.writers.block_fp8 import BlockFp8Writer
from sglang_ascend.quantization.writers.compressed_tensors import CompressedTensorsWriter
from sglang_ascend.quantization.writers.float32 import Float32Writer
from sglang_ascend.quantization.writers.modelslim import ModelSlimWriter

__all__ = ["Writer", "make_writer"]


def make_writer(name: str, source: Layout) -> Writer:
    """The writer of the layout `name`, for weights that were read by `source`."""
    if name == ModelSlimWriter.name:
        return ModelSlimWriter(source if isinstance(source, ModelSlim) else None)
    writers = (CompressedTensorsWriter, BlockFp8Writer, Float32Writer)
    return {writer.name: writer for writer in writers}[name]()
