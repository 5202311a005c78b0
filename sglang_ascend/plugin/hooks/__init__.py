"""Hooks: the rows, and whether each took."""
