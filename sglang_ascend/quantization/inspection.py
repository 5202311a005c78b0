"""What a checkpoint holds, by layer and scheme, and what multiplies it on this CPU."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from sglang_ascend.checkpoint.errors import shown
from sglang_ascend.checkpoint.layers import EXPERT
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts import Scheme

OUTSIDE = "outside layers"
NO_OPERATOR = "none: convert"
LAYER = re.compile(r"((?:.+?\.)?\D[^.]*)\.(\d+)\.")  # a name, up to and with its first number


@dataclass(frozen=True)
class Share:
    """What of a checkpoint is in one format: quantized modules, or float tensors of one dtype."""

    num_modules: int
    num_bytes: int


@dataclass(frozen=True)
class Contents:
    """Layout, shares by layer and scheme, and of every quantized module the scheme and the body of
    `ops/quantized` that multiplies it on this CPU."""

    layout: str
    layers: Mapping[str, Mapping[str, Share]]
    schemes: Mapping[str, str]
    cpu_products: Mapping[str, str]

    @property
    def totals(self) -> dict[str, Share]:
        by_scheme: dict[str, list[Share]] = defaultdict(list)
        for shares in self.layers.values():
            for scheme, share in shares.items():
                by_scheme[scheme].append(share)
        return {scheme: _sum(shares) for scheme, shares in sorted(by_scheme.items())}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "totals": {name: asdict(s) for name, s in self.totals.items()}}

    def table(self) -> Table:
        """A row for each run of layers that hold the same."""
        table = Table("layers", "scheme", "weights", "MB of a layer", title=self.layout)
        table.add_column("CPU product")
        bodies: dict[str, set[str]] = defaultdict(set)
        for module, scheme in self.schemes.items():
            bodies[scheme].add(self.cpu_products[module])
        for name, shares in _runs(self.layers).items():
            for scheme, share in shares.items():
                table.add_row(Text(shown(name)), scheme, str(share.num_modules), _megabytes(share))
                name = ""
        table.add_section()
        for scheme, share in self.totals.items():
            products = "\n".join(sorted(bodies[scheme]))
            table.add_row("all", scheme, str(share.num_modules), _megabytes(share), products)
        table.add_row("all", "", "", _megabytes(_sum(list(self.totals.values()))))
        return table


def contents(checkpoint: Checkpoint) -> Contents:
    """What `checkpoint` holds."""
    counts: dict[str, dict[str, list[int]]] = {}

    def add(name: str, scheme: str, num_bytes: int) -> None:
        match = LAYER.match(name)
        layer = f"{match[1]}.{match[2]}" if match else OUTSIDE
        counted = counts.setdefault(layer, {}).setdefault(scheme, [0, 0])
        counted[0] += 1
        counted[1] += num_bytes

    for module, scheme in checkpoint.schemes.items():
        add(f"{module}.", scheme.name, _num_bytes(checkpoint, module))
    for name in checkpoint.float_names():
        entry = checkpoint.entries[name]
        add(name, entry.dtype, entry.num_bytes)
    layers = {
        layer: {scheme: Share(*counted) for scheme, counted in sorted(schemes.items())}
        for layer, schemes in sorted(counts.items(), key=_by_number)
    }
    names = {module: scheme.name for module, scheme in checkpoint.schemes.items()}
    return Contents(checkpoint.layout.name, layers, names, _cpu_products(checkpoint))


def _cpu_products(checkpoint: Checkpoint) -> dict[str, str]:
    """Of every quantized module; one of each kind, the smallest, is read to know its form."""
    from sglang_ascend.quantization.product import AS_FLOATS, cpu_body, is_decoded

    kinds: dict[tuple[Scheme, bool], list[str]] = defaultdict(list)
    for module, scheme in checkpoint.schemes.items():
        kinds[scheme, EXPERT.search(module) is not None].append(module)
    found = {}
    for (_, is_expert), modules in kinds.items():
        weight = checkpoint.weight(min(modules, key=lambda name: _num_bytes(checkpoint, name)))
        try:
            body = cpu_body(weight, is_expert)
        except ValueError:
            body = NO_OPERATOR
        found |= {module: AS_FLOATS if is_decoded(module) else body for module in modules}
    return {module: found[module] for module in checkpoint.schemes}


def _num_bytes(checkpoint: Checkpoint, module: str) -> int:
    return sum(checkpoint.entries[name].num_bytes for name in checkpoint.names_of(module))


def _by_number(item: tuple[str, object]) -> tuple[bool, str, int]:
    prefix, _, number = item[0].rpartition(".")
    return item[0] == OUTSIDE, prefix, int(number) if number.isdigit() else 0


def _runs(layers: Mapping[str, Mapping[str, Share]]) -> dict[str, Mapping[str, Share]]:
    """Layers that follow each other and hold the same, as one."""
    runs: list[tuple[str, int, int, Mapping[str, Share]]] = []
    named: dict[str, Mapping[str, Share]] = {}
    for layer, shares in layers.items():
        prefix, _, number = layer.rpartition(".")
        if not number.isdigit():
            named[layer] = shares
            continue
        begun = runs[-1] if runs else ("", 0, 0, {})
        if (begun[0], begun[2], begun[3]) == (prefix, int(number) - 1, shares):
            runs[-1] = (prefix, begun[1], int(number), shares)
        else:
            runs.append((prefix, int(number), int(number), shares))
    numbered = {
        f"{prefix}.{first}" + (f"-{last}" if last > first else ""): shares
        for prefix, first, last, shares in runs
    }
    return {**numbered, **named}


def _sum(shares: list[Share]) -> Share:
    return Share(sum(s.num_modules for s in shares), sum(s.num_bytes for s in shares))


def _megabytes(share: Share) -> str:
    return f"{share.num_bytes / 1e6:,.2f}"
