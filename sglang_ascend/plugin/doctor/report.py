"""What `sglang-ascend doctor` found, and how it is printed: a table, plain lines or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Section:
    """One table of the report. Every problem is one sentence with its remedy."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    sections: tuple[Section, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem for section in self.sections for problem in section.problems)

    def to_json(self) -> str:
        """`{"ok": ..., "problems": [...], "sections": {title: [{column: value}]}}`."""
        sections = {
            section.title: [dict(zip(section.columns, row, strict=True)) for row in section.rows]
            for section in self.sections
        }
        fields = {"ok": not self.problems, "problems": self.problems, "sections": sections}
        return json.dumps(fields, indent=2)

    def print(self, console: Console) -> None:
        """Tables on a terminal; elsewhere one line per row, which grep and a log keep whole."""
        for section in self.sections:
            if console.is_terminal:
                console.print(_table(section))
            else:
                _print_plain(section, console)
        for problem in self.problems:
            console.print(f"PROBLEM: {problem}", style="bold red", markup=False, soft_wrap=True)
        if not self.problems:
            console.print("No problem found.", style="bold green")


def _table(section: Section) -> Table:
    table = Table(*section.columns, title=section.title, title_justify="left", show_lines=False)
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table


def _print_plain(section: Section, console: Console) -> None:
    console.print(f"{section.title}:", markup=False)
    for row in section.rows or (("none",),):
        console.print("  " + " | ".join(row), markup=False, highlight=False, soft_wrap=True)
