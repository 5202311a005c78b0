"""Quantized checkpoints on the CPU: any layout's weights reach SGLang's layers as rows of bytes."""
