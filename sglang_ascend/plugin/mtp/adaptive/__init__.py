"""Adaptive drafting on a server."""
