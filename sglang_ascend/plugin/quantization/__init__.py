"""Quantized checkpoints on the CPU and the NPU: weights reach SGLang's layers as rows of bytes."""
