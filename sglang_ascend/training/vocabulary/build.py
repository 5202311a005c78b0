"""Tokenizer and text in, `draft_vocabulary.json` out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ascend import __version__
from sglang_ascend.files import replaced
from sglang_ascend.speculative.vocabulary.file import FILE_NAME, parse_vocabulary
from sglang_ascend.speculative.vocabulary.scripts import scripts_of
from sglang_ascend.training.vocabulary.rankings import Counts, count, vocabulary_list
from sglang_ascend.training.vocabulary.sources import Source, SourceError

# A sentencepiece vocabulary marks a space so; a byte that is no character alone is "<0x0A>".
_SPACE = "▁"


class Builder:
    """Counts text by a checkpoint's tokenizer.

    Args:
        folder: the checkpoint: tokenizer and config.json.

    Raises:
        SourceError: it has none.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.vocab_size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
        except Exception as error:  # each config and tokenizer of transformers has its own
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise SourceError(
                f"{folder} has no tokenizer and config.json that load ({lines[0]}): name a "
                "checkpoint folder, such as `sglang-ascend model-path smollm2-mtp` prints."
            ) from None
        self.special_ids = sorted(i for i in self.tokenizer.all_special_ids if i < self.vocab_size)
        self.scripts = scripts_of(token_bytes(self.tokenizer, self.vocab_size), self.special_ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def count(
        self, sources: list[Source], tick: Callable[[Source, int], object]
    ) -> tuple[Counts, list[dict[str, Any]]]:
        """As `rankings.count`. Raises SourceError."""
        counts, provenance = count(sources, self.encode, self.scripts, tick)
        if not counts.languages():
            raise SourceError("All the text together has too few tokens to rank: name more of it.")
        return counts, provenance

    def write(
        self, out: Path, counts: Counts, provenance: list[dict[str, Any]], size: int
    ) -> dict[str, int]:
        """The file that `speculative.vocabulary.file` reads -> how many tokens each language lists.

        Raises DraftVocabularyError, and leaves what is there: the lists are larger than the
        vocabulary.
        """
        rows = []
        for language in counts.languages():
            ids, numbers = vocabulary_list(counts.of(language), self.special_ids, size)
            counted = int(counts.of(language).sum())
            row = {"name": language, "counted_tokens": counted, "token_ids": ids, "counts": numbers}
            rows.append(row)
        names, of_token = self.scripts
        content = {
            "languages": rows,
            "scripts": {"names": names, "of_token": of_token},
            "sources": provenance,
            "written_by": f"sglang-ascend {__version__}",
        }
        out.mkdir(parents=True, exist_ok=True)
        path, text = out / FILE_NAME, (json.dumps(content) + "\n").encode()
        parse_vocabulary(path, text, self.vocab_size)
        with replaced(path) as part:
            part.write_bytes(text)
        return {row["name"]: len(row["token_ids"]) for row in rows}


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """What each id stands for in UTF-8, of byte-level and of sentencepiece tokenizers; ids without
    a token stand for nothing."""
    added = {str(token) for token in tokenizer.get_added_vocab()}
    names = {i: token for token, i in tokenizer.get_vocab().items() if i < vocab_size}
    alphabet = _byte_level_alphabet()
    plain = [name for name in names.values() if name not in added]
    is_byte_level = all(character in alphabet for name in plain for character in name)

    def of(name: str) -> bytes:
        if name in added:
            return name.encode()
        if is_byte_level:
            return bytes(alphabet[character] for character in name)
        if len(name) == 6 and name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        return name.replace(_SPACE, " ").encode()

    return [of(names[i]) if i in names else b"" for i in range(vocab_size)]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where it is printed, else the next from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    alphabet = {chr(byte): byte for byte in printed}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}
