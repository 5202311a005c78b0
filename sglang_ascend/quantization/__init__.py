"""Quantized weights: one description of them, and every kind of checkpoint that holds them."""
