"""Text to count tokens in: files of text, of JSON lines, and the target's own shards."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from sglang_ascend.training.generation.conversation import FORCED
from sglang_ascend.training.generation.prompt_files import whole
from sglang_ascend.training.provenance import sha256

# Characters of a text file that are counted as one document.
DOCUMENT_CHARACTERS = 1000
# Of one line that are read at once: a file may be one line.
LINE_CHARACTERS = 100 * DOCUMENT_CHARACTERS
# Where a JSON line has its text; "messages" holds a list of {"role", "content"}.
TEXT_KEYS = ("text", "content", "prompt", "instruction", "input", "output", "response", "reply")


class SourceError(ValueError):
    """A source cannot be counted; the message is one sentence that names it and the remedy."""


@dataclass(frozen=True)
class Source:
    """A file, and the language that the user says it has; None where its tokens tell."""

    path: Path
    language: str | None

    def sha256(self) -> str:
        return sha256(self.path)


def parse_sources(asked: list[str]) -> list[Source]:
    """Of LANGUAGE=PATH or PATH, where a folder stands for the files in it that can be read.

    Raises SourceError.
    """
    sources = []
    for text in asked:
        language, equals, path = text.partition("=")
        is_named = equals and not Path(text).exists()  # a folder may be called lang=en
        source = Source(Path(path), language) if is_named else Source(Path(text), None)
        if not source.path.exists():
            raise SourceError(f"{source.path} does not exist: name text to count.")
        paths = [source.path]
        if source.path.is_dir():
            paths = [p for p in sorted(source.path.iterdir()) if p.suffix in _READERS]
        if not paths:
            raise SourceError(
                f"{source.path} holds none of {', '.join(_READERS)}: name files of text, or the "
                "folder that `sglang-ascend train generate` wrote."
            )
        sources += [Source(path, source.language) for path in paths]
    return sources


def documents(source: Source, encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    """The token ids of one document after another.

    Raises SourceError: the file is empty, cannot be decoded or has no text where it should.
    """
    reader = _READERS.get(source.path.suffix)
    if reader is None:
        raise SourceError(
            f"{source.path} is none of {', '.join(_READERS)}: rename plain text to .txt."
        )
    found = False
    try:
        for document in reader(source.path):
            tokens = encode(document) if isinstance(document, str) else document
            found = found or bool(tokens)
            yield tokens
    except UnicodeDecodeError:
        raise SourceError(
            f"{source.path} is not UTF-8 at byte {_first_not_utf8(source.path)}: convert it, as "
            "with iconv."
        ) from None
    if not found:
        raise SourceError(f"{source.path} holds no text: leave it out.")


def check_readable(sources: Iterable[Source]) -> None:
    """Reads all of it once, before hours of other work. Raises SourceError."""
    for source in sources:
        for _ in documents(source, lambda text: [0] if text.strip() else []):
            pass


def _first_not_utf8(path: Path) -> int:
    """Of a whole file that is none; an error of reading counts from where its read began."""
    decoder, end = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            kept = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                return end - kept + error.start
            end += len(chunk)
    return end - len(decoder.getstate()[0])  # the file ends within a character


def _read_text(path: Path) -> Iterator[str]:
    lines, size = [], 0
    with path.open(encoding="utf-8-sig") as file:
        while line := file.readline(LINE_CHARACTERS):
            lines.append(line)
            size += len(line)
            if size >= DOCUMENT_CHARACTERS:
                yield "".join(lines)
                lines, size = [], 0
    yield "".join(lines)


def _read_json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = "\n".join(_texts(json.loads(line)))
            except json.JSONDecodeError as error:
                raise SourceError(
                    f"{path}:{number} is not JSON ({error.msg}): repair it."
                ) from None
            if not text:
                raise SourceError(
                    f"{path}:{number} has no text: a line is a string, or an object with one of "
                    f"{', '.join(TEXT_KEYS)} or with messages."
                )
            yield whole(text)


def _texts(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield row
    elif isinstance(row, list):
        for one in row:
            yield from _texts(one)
    elif isinstance(row, dict):
        yield from (row[key] for key in TEXT_KEYS if isinstance(row.get(key), str))
        yield from _texts(row.get("messages"))


def _read_shard(path: Path) -> Iterator[list[int]]:
    """Of each conversation the tokens that the target wrote."""
    try:
        shard = load_file(path)
        lengths = shard["lengths"].tolist()
        parts = zip(shard["tokens"].split(lengths), shard["roles"].split(lengths), strict=True)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise SourceError(
            f"{path} is no shard of `sglang-ascend train generate` ({type(error).__name__}): "
            "leave it out."
        ) from None
    yield from (tokens[roles != FORCED].tolist() for tokens, roles in parts)


_READERS: dict[str, Callable[[Path], Iterator[str | list[int]]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".safetensors": _read_shard,
}
