"""Prompts that a user wrote: a JSON list or JSON lines, in the shapes that people have them in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_ascend.training.generation.prompts import prompt_key

BOM = "\ufeff"  # with which some programs of Windows begin every file
_SHAPES = 'a string, {"prompt": …, "domain": …} or {"messages": [{"role": "user", "content": …}]}'


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Rows of {"domain", "prompt"} without repetitions; the domain is "prompts" where none is said.

    Raises:
        ValueError: the file is empty, no JSON, or holds anything else.
    """
    rows = [_prompt(path, number, row) for number, row in _rows(path)]
    distinct: dict[str, dict[str, str]] = {}
    for row in rows:
        distinct.setdefault(" ".join(row["prompt"].split()), row)
    if not distinct:
        raise ValueError(f"{path} holds no prompt: write one a line, each {_SHAPES}.")
    return list(distinct.values())


def keys_of(paths: Iterable[Path]) -> set[str]:
    """`prompt_key` of every prompt of the files: what must not be generated on."""
    return {prompt_key(row["prompt"]) for path in paths for row in read_prompts(path)}


def _rows(path: Path) -> list[tuple[int, Any]]:
    """Each row with its number, from 1."""
    try:
        text = path.read_text(encoding="utf-8").removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}: convert it.") from None
    number, rows = 0, []
    try:
        if text.lstrip().startswith("["):
            return list(enumerate(json.loads(text), start=1))
        for number, line in enumerate(text.split("\n")):
            if line.strip():
                rows.append((number + 1, json.loads(line)))
    except json.JSONDecodeError as error:
        line = number + error.lineno
        raise ValueError(f"{path}:{line} is not JSON ({error.msg}): repair it.") from None
    return rows


def _prompt(path: Path, number: int, row: Any) -> dict[str, str]:
    domain, prompt = "prompts", row
    if isinstance(row, dict):
        domain, prompt = row.get("domain", domain), row.get("prompt")
        turns = row.get("messages")
        if prompt is None and isinstance(turns, list):
            users = (t.get("content") for t in turns if isinstance(t, dict) and _is_user(t))
            prompt = next(users, None)
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(domain, str):
        raise ValueError(f"{path} must hold prompts, and row {number} is none of {_SHAPES}.")
    return {"domain": domain, "prompt": whole(prompt)}


def whole(text: str) -> str:
    """With U+FFFD for each half of a character beyond U+FFFF: JSON can hold one where a program cut
    an emoji, and no tokenizer takes it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_user(turn: dict[str, Any]) -> bool:
    return turn.get("role") == "user"
