"""Which script a token id is written in, decided once for a tokenizer's whole vocabulary."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

# Tokens of any script: digits, punctuation, spaces, and bytes that begin letters of several.
COMMON = "common"
SPECIAL = "special"  # the tokenizer's own, such as the end of a turn
CODE = "code"  # signs and indentation

_CODE_SIGNS = frozenset("{}[]<>=;_\\#&|$@^~`\t")
# The least share of such tokens in a text that is code, and of kana in a Japanese one.
MIN_CODE_SHARE, MIN_KANA_SHARE = 0.15, 0.05
# By the first word of a letter's Unicode name, where that is not the name of its script.
_NAMES = {"CJK": "han", "HIRAGANA": "kana", "KATAKANA": "kana", "COMBINING": "", "MODIFIER": ""}


def scripts_of(
    tokens: Sequence[bytes], special_ids: Collection[int]
) -> tuple[list[str], list[int]]:
    """The names of the scripts, and for each token id the place of its own among them."""
    special = set(special_ids)
    of_token = [SPECIAL if i in special else script_of(token) for i, token in enumerate(tokens)]
    names = sorted(set(of_token))
    places = {name: place for place, name in enumerate(names)}
    return names, [places[name] for name in of_token]


def script_of(token: bytes) -> str:
    """The one script of all letters in a token's UTF-8, which may begin or end within a letter."""
    text = token.decode("utf-8", errors="ignore")
    scripts = {script for script in map(_script_of_letter, text) if script}
    if begun := _begun_letter(token):
        scripts.add(_script_of_begun(begun))
    if len(scripts) == 1:
        return scripts.pop()
    if not scripts and (_CODE_SIGNS & set(text) or text.endswith("  ")):
        return CODE
    return COMMON


def dominant_script(counts: Mapping[str, int]) -> str:
    """Of a text's tokens by script: its language as far as scripts tell languages apart."""
    words = {name: n for name, n in counts.items() if n and name not in (COMMON, SPECIAL, CODE)}
    num_letters = sum(words.values())
    num_code = counts.get(CODE, 0)
    if num_code > MIN_CODE_SHARE * (num_letters + counts.get(COMMON, 0) + num_code):
        return CODE
    if words.get("kana", 0) > MIN_KANA_SHARE * num_letters:
        return "kana"
    return max(words, key=lambda name: words[name], default=COMMON)


@cache
def _script_of_letter(character: str) -> str | None:
    """As its Unicode name says: "CYRILLIC SMALL LETTER PE" is cyrillic. None for other signs."""
    if unicodedata.category(character)[0] not in "LM":
        return None
    name = unicodedata.name(character, "").partition(" ")[0]
    return _NAMES.get(name, name.lower()) or None


def _begun_letter(token: bytes) -> bytes:
    """The first bytes of a character at the end of a token, which the next token completes."""
    for size in range(1, min(3, len(token)) + 1):
        lead = token[-size]
        if lead >= 0xC0:
            whole = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return token[-size:] if whole > size else b""
        if lead < 0x80:
            break
    return b""


@cache
def _script_of_begun(begun: bytes) -> str:
    """The script of every letter that begins with these bytes, if they have one in common."""
    if begun[0] >= 0xF0:
        return COMMON
    scripts = {_script_of_letter(character) for character in _completions(begun)} - {None}
    return scripts.pop() or COMMON if len(scripts) == 1 else COMMON


def _completions(begun: bytes) -> Iterator[str]:
    missing = 2 + (begun[0] >= 0xE0) - len(begun)
    for number in range(64**missing):
        rest = bytes(0x80 | (number >> 6 * place) & 63 for place in reversed(range(missing)))
        yield from (begun + rest).decode("utf-8", errors="ignore")
