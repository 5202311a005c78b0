"""What is sent back: one JSON file with everything, and the same as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sglang_ascend.verify.checks import Check, Measured, PartResult
from sglang_ascend.verify.machine import Machine

TITLES = {
    "operators": "Operators: each body against its reference",
    "synchronisation": "Synchronisation: waits inside of an operator's body",
    "operator-speed": "Speed of the operators: what would serve instead / body, alternating",
    "serving": "Servers without and with MTP",
    "serving-waits": "Waits of a decode step, by torch_npu's debug mode",
}
WORDS = {True: "pass", False: "FAIL", None: "-"}


def passed(results: Sequence[PartResult]) -> bool:
    return not any(result.failures for result in results)


def write_report(folder: Path, machine: Machine, results: Sequence[PartResult]) -> Path:
    """report.json and report.md in ``folder``; returns the latter."""
    fields = {
        "label": machine.label,
        "machine": machine.facts,
        "passed": passed(results),
        "parts": [result.to_json() for result in results],
    }
    (folder / "report.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    path = folder / "report.md"
    path.write_text(markdown(machine, results), encoding="utf-8")
    return path


def markdown(machine: Machine, results: Sequence[PartResult]) -> str:
    lines = ["# sglang-ascend verify-npu", "", f"**{machine.label}**", "", verdict(results), ""]
    lines += ["| machine | |", "|---|---|"]
    lines += [f"| {name} | {cell(value)} |" for name, value in machine.facts.items()]
    for result in results:
        lines += ["", f"## {TITLES[result.part]}", "", f"{result.seconds:.0f} s", ""]
        lines += ["| check | result | measured | note |", "|---|---|---|---|"]
        lines += [
            row(check) for check in result.checks if check.measured or check.passed is not None
        ]
        lines += ["", *left_out(result.checks)]
    return "\n".join(lines) + "\n"


def left_out(checks: Sequence[Check]) -> list[str]:
    """One line for each reason why something was neither judged nor measured."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check.passed is None and not check.measured:
            reasons.setdefault(check.note, []).append(check.name)
    return [f"- {cell(note)}: {', '.join(names)}" for note, names in reasons.items()]


def verdict(results: Sequence[PartResult]) -> str:
    judged = [check for part in results for check in part.checks if check.passed is not None]
    failed = [check for check in judged if not check.passed]
    counted = f"{len(judged) - len(failed)} of {len(judged)} checks passed"
    return counted + (": " + ", ".join(check.name for check in failed) if failed else "") + "."


def row(check: Check) -> str:
    cells = (check.name, WORDS[check.passed], shown(check.measured), check.note)
    return f"| {' | '.join(map(cell, cells))} |"


def shown(measured: Measured) -> str:
    values = {
        name: f"{value:.3g}" if isinstance(value, float) else str(value)
        for name, value in measured.items()
    }
    return ", ".join(f"{name} {value}" for name, value in values.items())


def cell(text: str) -> str:
    """Nothing that a table's cell or a reader's browser would take for markup."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(escaped.split())
