"""Speculative decoding policy on tensors: draft a chain, verify it, extend the MTP layer."""
