"""Post-training quantization: from a float checkpoint to a quantized one, and what that cost."""
