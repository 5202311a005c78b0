"""Transforms of float weights that are folded into their neighbours before quantization."""
