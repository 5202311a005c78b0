"""What the last HIVM artefact of a kernel says: vector instructions, loops over scalars, memory."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

TRANSFER = re.compile(
    r"(call @(load_gm_to|store_|copy_|nd2nz|nz2nd|fixpipe))"
    r"|hivm\.hir\.(load|store|copy|nd2nz|nz2nd|fixpipe)\b"
)
MATRIX = re.compile(r"call @mma|hivm\.hir\.mmad")
# Library calls and functions of vector instructions (950); what is neither is address arithmetic.
VECTOR = re.compile(r"\bcall @|\bhivm\.hir\.v[a-z]|regbaseintrins\.intr\.hivm\.v[a-z]")
ELEMENT = re.compile(r"\bmemref\.(load|store)\b")
# One element of global memory, as a transfer takes it.
SINGLE = re.compile(r"memref\.cast .*: memref<1(x1)*x[a-z]+\d+, .*#hivm\.address_space<gm>> to")

STRUCTURED_LOOP = re.compile(r"\b(scf|affine)\.(for|while|parallel|forall)\b")
BLOCK = re.compile(r"^\s*\^bb(\d+)")
BRANCH = re.compile(r"\bcf\.(br|cond_br|switch)\b")
FUNCTION = re.compile(r"^\s*func\.func (?!private)@(\w+)")

CONSTANT = re.compile(r"(%\w+) = (?:arith\.constant|llvm\.mlir\.constant\()\s*(\d+) ?: i64")
POINTER = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\) .*: "
    r"memref<([\dx]+)x([a-z]+)(\d+), #hivm\.address_space<(\w+)>>"
)


@dataclass(frozen=True)
class Loop:
    """An innermost loop: where it starts, and its own instructions."""

    function: str
    line: int
    body: tuple[str, ...]

    @property
    def touches_elements(self) -> bool:
        return any(ELEMENT.search(line) for line in self.body)

    @property
    def computes(self) -> bool:
        return any(kind_of(line) in ("vector", "matrix") for line in self.body)

    @property
    def moves_rows(self) -> bool:
        transfers = any(kind_of(line) == "transfer" for line in self.body)
        return transfers and not any(SINGLE.search(line) for line in self.body)


@dataclass(frozen=True)
class Report:
    """Counts are of instructions in the code, not of executions.

    scalar_loops: innermost loops that read, write or move single elements and compute with nothing
        wider: what a vector instruction or one transfer would do at once.
    row_loops: innermost loops that read an address and move one row by it: a gather.
    used_bits: the highest bit in use by memory ("ub", "cbuf" (L1), "cc" (L0C)).
    """

    vector: int
    matrix: int
    transfers: int
    scalar_loops: tuple[Loop, ...]
    row_loops: tuple[Loop, ...]
    used_bits: dict[str, int]

    def __str__(self) -> str:
        bits = " ".join(f"{memory}={used}" for memory, used in sorted(self.used_bits.items()))
        return (
            f"vector {self.vector:4} matrix {self.matrix:2} transfer {self.transfers:3} "
            f"scalar loops {len(self.scalar_loops)} row loops {len(self.row_loops)} bits {bits}"
        )


def kind_of(line: str) -> str | None:
    for kind, pattern in (("transfer", TRANSFER), ("matrix", MATRIX), ("vector", VECTOR)):
        if pattern.search(line):
            return kind
    return None


def functions_of(module: str) -> Iterator[tuple[str, int, list[str]]]:
    """(name, number of the first line, lines) of every function with a body."""
    lines = module.splitlines()
    starts = [i for i, line in enumerate(lines) if FUNCTION.match(line)]
    for start in starts:
        match = FUNCTION.match(lines[start])
        assert match
        yield match[1], start + 1, lines[start : start + 1 + _length_of_region(lines[start:])]


def _length_of_region(lines: list[str]) -> int:
    """Lines after the first up to the one that closes the first one's last brace."""
    depth = 0
    for i, line in enumerate(lines):
        depth += line.count("{") - line.count("}")
        if depth <= 0:
            return i
    raise ValueError(f"the region that {lines[0].strip()!r} opens does not end.")


def _loop_spans(lines: list[str]) -> list[tuple[int, int]]:
    """[first, last] line of every loop: regions of structured ones, spans of branches backwards."""
    spans = [
        (i, i + _length_of_region(lines[i:]))
        for i, line in enumerate(lines)
        if STRUCTURED_LOOP.search(line)
    ]
    blocks = {match[1]: i for i, line in enumerate(lines) if (match := BLOCK.match(line))}
    for i, line in enumerate(lines):
        if BRANCH.search(line):
            targets = [blocks[name] for name in re.findall(r"\^bb(\d+)", line)]
            spans += [(target, i) for target in targets if target <= i]
    return spans


def innermost_loops(module: str) -> list[Loop]:
    loops = []
    for name, first_line, lines in functions_of(module):
        spans = _loop_spans(lines)
        for start, end in spans:
            inner = (s for s in spans if s != (start, end) and start <= s[0] and s[1] <= end)
            if not any(inner):
                loops.append(Loop(name, first_line + start, tuple(lines[start : end + 1])))
    return loops


def used_bits(module: str) -> dict[str, int]:
    used: dict[str, int] = defaultdict(int)
    for _, _, lines in functions_of(module):
        offsets = {m[1]: int(m[2]) for line in lines if (m := CONSTANT.search(line))}
        for line in lines:
            if match := POINTER.search(line):
                addresses, shape, _, width, memory = match.groups()
                bits = math.prod(map(int, shape.split("x"))) * int(width)
                for address in addresses.split(", "):
                    used[memory] = max(used[memory], 8 * offsets[address] + bits)
    return dict(used)


def takes_lock(module: str) -> bool:
    """Whether cores lock each other out: the launcher then copies synchronously, which no capture
    of a graph allows."""
    return "call @sync_block_lock" in module


def report_of(module: str) -> Report:
    kinds = [kind_of(line) for _, _, lines in functions_of(module) for line in lines]
    loops = [loop for loop in innermost_loops(module) if loop.touches_elements]
    idle = [loop for loop in loops if not loop.computes]
    return Report(
        kinds.count("vector"),
        kinds.count("matrix"),
        kinds.count("transfer"),
        tuple(loop for loop in idle if not loop.moves_rows),
        tuple(loop for loop in idle if loop.moves_rows),
        used_bits(module),
    )
