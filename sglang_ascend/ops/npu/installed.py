"""Compares what CONSTRAINTS says of torch_npu with the torch_npu that is installed."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import torch

from sglang_ascend.ops.npu.constraint import DOCS, Constraints


def difference(constraints: Constraints, docs: list[str]) -> str | None:
    """In what the installed operator differs from ``constraints``, None for nothing.

    ``docs``: the lines of torch_npu's documentation, as ``documentation`` reads them.
    """
    packet = getattr(torch.ops.npu, constraints.name, None)
    if packet is None:
        return f"torch_npu has no operator {constraints.name}"
    if str(packet.default._schema) != constraints.schema:
        return f"torch_npu has {constraints.name} with another schema"
    for rule in constraints.rules:
        quoted = docs[rule.line - 1] if 0 < rule.line <= len(docs) else ""
        if rule.line and rule.quote not in quoted:
            return (
                f"torch_npu no longer says of {constraints.name} that {rule.says} ({rule.source})"
            )
    return None


def documentation() -> list[str] | None:
    """The lines of the installed documentation; None where torch_npu is not installed."""
    if find_spec("torch_npu") is None:
        return None
    path = metadata.distribution("torch_npu").locate_file(f"torch_npu/{DOCS.split()[-1]}")
    with open(str(path), encoding="utf-8") as file:
        return file.read().split("\n")
