"""Owns one reader for each unpacked corpus package: folder in, plain text documents out."""

import gzip
import html
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

LONGEST_FILE = 60_000
LINES_IN_A_DOCUMENT = 25
LANGUAGES = {
    "cmn_hans": "zh",
    "cmn_hant": "zh-tw",
    "jpn": "ja",
    "deu_1996": "de",
    "fra": "fr",
    "spa": "es",
    "rus": "ru",
    "por_BR": "pt",
    "ita": "it",
    "kor": "ko",
}
DJANGO_LANGUAGES = "zh_Hans zh_Hant ja de fr es ru pt_BR it ko".split()
_PO_ENTRY = re.compile(r'msgid (".*?"(?:\n".*?")*)\nmsgstr (".*?"(?:\n".*?")*)\n')


def austen(folder: Path) -> Iterator[str]:
    """Six novels: R's lazy-load file is a run of chunks, each a length and a zlib stream."""
    (database,) = folder.rglob("janeaustenr/data/Rdata.rdb")
    raw = database.read_bytes()
    while raw:
        stream = zlib.decompressobj()
        chunk = stream.decompress(raw[4:])
        raw = stream.unused_data
        text = "\n".join(_r_strings(chunk))
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
        yield from _pieces([p for p in paragraphs if p], size=4000, joint="\n\n")


def _r_strings(chunk: bytes) -> list[str]:
    """The strings of a serialised R character vector (XDR form), else an empty list."""
    # Header: 'X\n', three words, and in version 3 the length and name of the encoding.
    version = struct.unpack(">i", chunk[2:6])[0]
    at = 14 if version == 2 else 18 + struct.unpack(">i", chunk[14:18])[0]
    kind, count = chunk[at + 3], struct.unpack(">i", chunk[at + 4 : at + 8])[0]
    if kind != 16:  # STRSXP
        return []
    at += 8
    strings = []
    for _ in range(count):
        length = struct.unpack(">i", chunk[at + 4 : at + 8])[0]
        at += 8
        strings.append(chunk[at : at + max(length, 0)].decode("utf-8", "replace"))
        at += max(length, 0)
    return strings


def wordnet(folder: Path) -> Iterator[str]:
    """Dictionary entries, a dozen to a document."""
    (dictionary,) = folder.rglob("*.dict.dz")
    text = gzip.decompress(dictionary.read_bytes()).decode("utf-8", "replace")
    entries = [re.sub(r"\s+", " ", entry) for entry in re.split(r"\n(?=\S)", text)]
    entries = [entry for entry in entries if 60 < len(entry) < 600][::5]
    yield from _pieces(entries, size=2000, joint="\n")


def python_docs(folder: Path) -> Iterator[str]:
    """The reStructuredText sources of the Python manual."""
    for path in sorted(folder.rglob("*.rst.txt")):
        yield path.read_text(encoding="utf-8", errors="replace")[:LONGEST_FILE]


def python_code(folder: Path) -> Iterator[str]:
    """The standard library's modules."""
    for path in sorted(folder.rglob("*.py")):
        if path.is_file():  # the package holds links to files of other packages
            yield path.read_text(encoding="utf-8", errors="replace")[:LONGEST_FILE]


def factbook(folder: Path) -> Iterator[str]:
    """One country to a document, one fact to a line."""
    for path in sorted(folder.rglob("*.json")):
        if path.name != "package.json":
            facts = _facts(json.loads(path.read_text(encoding="utf-8")))
            yield "\n".join(f"{name}: {' '.join(text.split())}" for name, text in facts)


def _facts(node: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        if isinstance(node.get("text"), str):
            yield name, node["text"]
        else:
            for key, value in node.items():
                yield from _facts(value, key)


def declaration(folder: Path) -> Iterator[str]:
    """The Universal Declaration of Human Rights in ten languages."""
    for code in LANGUAGES:
        page = (folder / "package" / "declaration" / f"{code}.html").read_text(encoding="utf-8")
        yield html.unescape(re.sub(r"\n\s*\n+", "\n", re.sub(r"<[^>]+>", "\n", page))).strip()


def diagnostics(folder: Path) -> Iterator[str]:
    """TypeScript's compiler messages: English = translation."""
    for path in sorted(folder.rglob("diagnosticMessages.generated.json")):
        messages = json.loads(path.read_text(encoding="utf-8-sig"))
        lines = [
            f"{re.sub(r'_[0-9]+$', '', key).replace('_', ' ')} = {text}"
            for key, text in messages.items()
        ]
        yield from _blocks(lines)


def translations(folder: Path) -> Iterator[str]:
    """Django's message catalogues: English = translation."""
    for path in sorted(folder.rglob("LC_MESSAGES/*.po")):
        if path.parts[-3] in DJANGO_LANGUAGES:
            pairs = _PO_ENTRY.findall(path.read_text(encoding="utf-8"))
            lines = [f"{_po_text(a)} = {_po_text(b)}" for a, b in pairs]
            yield from _blocks([line for line in lines if line.strip(" =")])


def _po_text(quoted: str) -> str:
    return "".join(re.findall(r'"(.*)"', quoted)).replace("\\n", " ")


def _blocks(lines: list[str]) -> Iterator[str]:
    for start in range(0, len(lines), LINES_IN_A_DOCUMENT):
        yield "\n".join(lines[start : start + LINES_IN_A_DOCUMENT])


def _pieces(items: list[str], size: int, joint: str) -> Iterator[str]:
    """Join consecutive items into documents of about `size` characters."""
    piece: list[str] = []
    for item in items:
        piece.append(item)
        if sum(map(len, piece)) > size:
            yield joint.join(piece)
            piece = []
    if piece:
        yield joint.join(piece)


READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    "austen": austen,
    "wordnet": wordnet,
    "python_docs": python_docs,
    "python_code": python_code,
    "factbook": factbook,
    "declaration": declaration,
    "diagnostics": diagnostics,
    "translations": translations,
}
