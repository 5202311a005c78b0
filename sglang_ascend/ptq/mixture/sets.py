"""The sets of a mixture: templates, the model's own conversations, and any JSONL by its path."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sglang_ascend.checkpoint.errors import shown
from sglang_ascend.ptq.mixture.shares import allocate, parse_shares
from sglang_ascend.ptq.text import ROWS, Text, own_text
from sglang_ascend.training.generation.outputs import greedy_replies
from sglang_ascend.training.generation.prompt_files import whole
from sglang_ascend.training.generation.prompts import DOMAINS, prompt_key, templated_prompt
from sglang_ascend.training.targets.families import Target

OWN = "own"
OWN_ONLY = f"{OWN}:1"
REPLY_TOKENS = 128
MAX_TOKENS = 512  # of a text that is taken as it is
DRAWS = 1000  # of templates for each text, before a domain counts as exhausted
FIELDS = ("prompt", "text")


@dataclass(frozen=True)
class Row:
    """A prompt that the model replies to, or a whole text."""

    field: str
    words: str


@dataclass(frozen=True)
class Part:
    """What one set gives: `count` texts, of the given rows or (no rows) of the model's own.

    Attributes:
        source: SHA-256 of the set's file; None of one that is generated.
    """

    name: str
    ratio: Fraction
    count: int
    rows: tuple[Row, ...]
    source: str | None = None


class Mixture:
    """The rows of every set, chosen by `seed`; no two alike but for case, signs and spaces.

    Args:
        words: `name:ratio` of every set, separated by commas: `own`, a domain of the templates, or
            the path of a JSONL file whose lines have a `prompt` or a `text`.
        total: texts of all sets.

    Raises:
        ValueError: wrong ratios, an unknown set, a file that cannot be read as one, or one with
            fewer distinct rows than its ratio asks for.
    """

    def __init__(self, words: str, total: int, seed: int) -> None:
        shares, taken = parse_shares(words), set()
        counts = allocate([share.ratio for share in shares], total)
        self.seed, self.parts = seed, []
        for number, (share, count) in enumerate(zip(shares, counts, strict=True)):
            rng, source = random.Random(f"{seed} {number}"), None
            if share.name == OWN:
                rows = ()
            elif share.name in DOMAINS:
                drawn = islice(_templated(rng, share.name), DRAWS * count)
                rows = _distinct(drawn, count, taken)
            else:
                path = Path(share.name)
                content = _content(path)
                source = hashlib.sha256(content).hexdigest()
                found = _rows(path, content)
                rng.shuffle(found)
                rows = _distinct(iter(found), count, taken)
            if share.name != OWN and len(rows) < count:
                raise ValueError(
                    f"--calibrate's {shown(share.name)} has {len(rows)} texts that no other set "
                    f"has and {count} are asked for; lower its ratio or --calibration-texts"
                )
            self.parts.append(Part(share.name, share.ratio, count, rows, source))

    @property
    def manifest(self) -> dict[str, Any]:
        """What decides the texts: seed, counts, and of other sets than the model's own SHA-256 of
        files and of rows."""

        def digest(rows: Sequence[Row]) -> str:
            content = json.dumps([[row.field, row.words] for row in rows])
            return hashlib.sha256(content.encode()).hexdigest()

        manifest = {"seed": self.seed, "texts": sum(part.count for part in self.parts)}
        if [part.name for part in self.parts] == [OWN]:
            return manifest
        sets = [
            {
                "name": part.name,
                "ratio": str(part.ratio),
                "texts": part.count,
                "file_sha256": part.source,
                "rows_sha256": digest(part.rows) if part.rows else None,
            }
            for part in self.parts
        ]
        return {**manifest, "sets": sets}

    def texts(self, target: Target) -> list[Text]:
        """The tokens of every set, in order; the model replies greedily to prompts."""
        found = []
        for part in self.parts:
            if part.count and part.name == OWN:
                found += own_text(target, self.seed, part.count)
            elif part.count:
                found += _read(target, part)
        return found


def _templated(rng: random.Random, domain: str) -> Iterator[Row]:
    while True:
        yield Row("prompt", templated_prompt(rng, domain))


def _distinct(rows: Iterator[Row], count: int, taken: set[str]) -> tuple[Row, ...]:
    """The first `count` whose key is not `taken`, which grows."""
    found = []
    while len(found) < count and (row := next(rows, None)) is not None:
        if (key := prompt_key(row.words)) not in taken:
            taken.add(key)
            found.append(row)
    return tuple(found)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        known = ", ".join((OWN, *DOMAINS))
        raise ValueError(
            f"--calibrate names {shown(path)}, which is neither one of {known} nor a readable file"
        ) from None


def _rows(path: Path, content: bytes) -> list[Row]:
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            field = next(f for f in FIELDS if isinstance(row.get(f), str) and row[f].strip())
        except (ValueError, AttributeError, StopIteration):
            raise ValueError(
                f"{shown(path)} has no JSON object with a prompt or a text in line {number}; "
                "correct it"
            ) from None
        found.append(Row(field, whole(row[field])))
    if not found:
        raise ValueError(f"{shown(path)} is empty; name a JSONL file with prompts or texts")
    return found


def _read(target: Target, part: Part) -> list[Text]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    lines = [row.words for row in part.rows if row.field == "text"]
    encoded = [tokenizer(line).input_ids[:MAX_TOKENS] for line in lines]
    prompts = [{"prompt": row.words} for row in part.rows if row.field == "prompt"]
    texts = [Text(part.name, torch.tensor(tokens), 0) for tokens in encoded]
    for start in range(0, len(prompts), ROWS):
        replies = greedy_replies(target, tokenizer, prompts[start : start + ROWS], REPLY_TOKENS)
        texts += [Text(part.name, tokens, length) for length, tokens, _ in replies]
    return texts
