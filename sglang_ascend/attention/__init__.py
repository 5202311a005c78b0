"""Attention policy on tensors: what a step's rows see. Knows rows, lengths and pages only."""
