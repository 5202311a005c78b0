"""Adapters to SGLang 0.5.23: one file per slot. Only this package imports ``sglang``."""
