"""Compares what DEMANDS says of torch_npu with the torch_npu that is installed."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import torch

from sglang_ascend.ops.npu.demand import DOCS, Demand


def difference(demand: Demand, docs: list[str]) -> str | None:
    """In what the installed operator is another one than ``demand`` describes, None for nothing.

    ``docs``: the lines of torch_npu's documentation, as ``documentation`` reads them.
    """
    packet = getattr(torch.ops.npu, demand.name, None)
    if packet is None:
        return f"torch_npu has no operator {demand.name}"
    if str(packet.default._schema) != demand.schema:
        return f"torch_npu has {demand.name} with another schema"
    for rule in demand.rules:
        quoted = docs[rule.line - 1] if 0 < rule.line <= len(docs) else ""
        if rule.line and rule.quote not in quoted:
            return f"torch_npu no longer says of {demand.name} that {rule.says} ({rule.source})"
    return None


def documentation() -> list[str] | None:
    """The lines of the installed documentation; None where torch_npu is not installed."""
    if find_spec("torch_npu") is None:
        return None
    path = metadata.distribution("torch_npu").locate_file(f"torch_npu/{DOCS.split()[-1]}")
    with open(str(path), encoding="utf-8") as file:
        return file.read().split("\n")
