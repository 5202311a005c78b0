"""What is asked of a word fits what WordNet says that it is."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from recipes.smollm2_mtp.requests import OF_TOPIC, request, with_articles
from recipes.smollm2_mtp.wordnet import TOPICS, Noun, WordNet, read_wordnet

# Lines of WordNet 3.1 (its licence), some figures changed: of each word sense, offset, sense number
# and how often it occurs in tagged texts; the topic is the number behind the first colon.
SENSES = """\
apple%1:13:00:: 07755101 1 2
apple%1:20:00:: 12654755 2 0
abaxial%3:00:00:: 00002312 1 0
dog%1:05:00:: 02086723 1 42
dog%1:18:01:: 09905672 2 0
eat%2:34:01:: 01170802 1 61
entity%1:03:00:: 00001740 1 11
ice_cream%1:13:00:: 07630109 1 5
quiet%3:00:01:: 01922321 1 20
zymurgy%1:04:00:: 00919999 1 0
"""
DATA = {
    "noun": """\
  1 This software and database is being provided to you, the LICENSEE, by
00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which is perceived to have its own existence
00919999 04 n 01 zymurgy 0 000 | the branch of chemistry concerned with fermentation
02086723 05 n 01 dog 0 000 | a member of the genus Canis; "the dog barked all night"
07630109 13 n 01 ice_cream 0 001 @ 07630108 n 0000 | frozen dessert; made of cream and sugar
07755101 13 n 01 apple 0 001 @ 07721456 n 0000 | fruit with red or yellow skin
""",
    "verb": """\
01170802 34 v 01 eat 0 000 01 + 08 00 | take in solid food; "She was eating a banana"
""",
    "adj": """\
00002312 00 a 01 abaxial 0 001 ! 00002098 a 0101 | facing away from the axis
01922321 00 a 01 quiet 0 001 ! 01922320 a 0101 | free of noise; "a quiet place"
""",
}


@pytest.fixture
def words(tmp_path: Path) -> WordNet:
    (tmp_path / "index.sense").write_text(SENSES)
    for name, text in DATA.items():
        (tmp_path / f"data.{name}").write_text(text)
    return read_wordnet(tmp_path)


def test_words_are_those_that_occur_by_the_topic_of_their_first_sense(words: WordNet) -> None:
    assert words.nouns == {
        "food": [
            Noun("apple", "fruit with red or yellow skin"),
            Noun("ice cream", "frozen dessert"),
        ],
        "animal": [Noun("dog", "a member of the genus Canis")],
        "top": [Noun("entity", "that which is perceived to have its own existence")],
    }
    assert (words.verbs, words.adjectives) == (["eat"], ["quiet"])
    # Not "a quiet place": a request needs more than a few words.
    assert words.sentences == ["the dog barked all night", "She was eating a banana"]


def test_requests_ask_of_a_word_what_its_topic_is_asked(words: WordNet) -> None:
    every_topic = {topic: [Noun(topic, f"definition of {topic}")] for topic in TOPICS.values()}
    words = WordNet(every_topic, words.verbs, words.adjectives, words.sentences)
    rng = random.Random(0)
    requests = [request(rng, words) for _ in range(5_000)]
    assert not [text for text in requests if re.search(r"[{}|\n]", text)]
    of_another_topic = {"Is animal healthy?", "What does a food eat?"}
    assert not of_another_topic & {*requests}
    assert {"Is food healthy?", "What does an animal eat?"} <= {*requests}
    assert "Continue this story: The dog barked all night." in requests
    assert 'Use the verb "eat" in three sentences.' in requests
    assert any("definition of" in text for text in requests)
    rng = random.Random(0)
    assert [request(rng, words) for _ in range(50)] == requests[:50]


def test_every_topic_has_its_own_forms() -> None:
    assert {*OF_TOPIC} == {*TOPICS.values()}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("How is a apple eaten?", "How is an apple eaten?"),
        ("A eel and a dog", "An eel and a dog"),
        ("a banana is", "a banana is"),
    ],
)
def test_articles_fit_the_word_behind_them(text: str, wanted: str) -> None:
    assert with_articles(text) == wanted
