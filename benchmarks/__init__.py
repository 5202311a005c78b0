"""Measurements only; what must hold is in tests/. Each prints its figures and its machine."""
