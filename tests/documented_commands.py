"""The shell commands of README.md, CONTRIBUTING.md and docs/: every line of a block marked sh, and
inline code that begins with a program of this repository."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
TABLE = Path(__file__).with_suffix(".toml")
# Whatever else a block holds is marked too, so that no command hides in a block without a mark.
LANGUAGES = ("sh", "python", "text", "promql", "sql")
INLINE = re.compile(
    r"(\w+=\S* )*((make|python -m|sglang-ascend|docker compose|pip install|scripts/[\w-]+\.sh) \S"
    r"|\.ci/run$)"
)
SETTING = re.compile(r"(export )?(\w+=('[^']*'|\"[^\"]*\"|\S*)\s*)+$")


@dataclass(frozen=True)
class Row:
    """A declared command; exactly one of the other fields says how it is shown."""

    command: str
    run: str = ""  # its short form, a line of bash
    serve: str = ""  # the same of one that serves; "$@" are the server's host and port
    shown_by: str = ""  # the test that runs it
    not_here: str = ""  # what a CPU machine lacks


def read_table(path: Path = TABLE) -> list[Row]:
    return [Row(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["row"]]


def documented_commands(documents: Iterable[Path] = DOCUMENTS) -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in documents)
    return {command for text in texts for command in commands_of(text)}


def commands_of(text: str) -> Iterator[str]:
    """On one line each, without comments."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "fence" and token.info == "sh":
            yield from lines_of(token.content)
        for child in token.children or ():
            words = " ".join(child.content.split())
            if child.type == "code_inline" and INLINE.match(words):
                yield words


def unmarked_blocks(text: str) -> list[str]:
    """First lines of code blocks without one of LANGUAGES."""
    return [
        token.content.splitlines()[0]
        for token in MarkdownIt("commonmark").parse(text)
        if token.type == "code_block" or (token.type == "fence" and token.info not in LANGUAGES)
    ]


def lines_of(script: str) -> Iterator[str]:
    """The commands of a script, one for each logical line; variables alone are not commands."""
    begun = ""
    for line in script.splitlines():
        begun = f"{begun} {line.strip()}".strip()
        if begun.endswith("\\"):
            begun = begun[:-1].rstrip()
            continue
        try:
            shlex.split(begun, comments=True)
        except ValueError:  # a quotation goes on
            continue
        command = re.sub(r"(^|\s+)#.*", "", begun)
        begun = ""
        if command and not SETTING.fullmatch(command):
            yield command


def undeclared(documented: set[str], table: list[Row]) -> list[str]:
    return sorted(documented - {row.command for row in table})


def undocumented(documented: set[str], table: list[Row]) -> list[str]:
    return [row.command for row in table if row.command not in documented]
