"""Transforms that leave a float model's outputs as they are and make it easier to quantize."""
