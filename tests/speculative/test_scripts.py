"""The script of a token id, from its bytes alone, and the language of text in eleven scripts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from sglang_ascend.models.catalog import model_path
from sglang_ascend.speculative.vocabulary.scripts import (
    COMMON,
    dominant_script,
    script_of,
    scripts_of,
)
from sglang_ascend.training.vocabulary.build import token_bytes

TEXTS = {
    "latin": "The river rose in the night, and by morning the lower fields were under water.",
    "cyrillic": "Ночью река поднялась, и к утру нижние поля оказались под водой.",
    "greek": "Το ποτάμι φούσκωσε τη νύχτα και το πρωί τα χωράφια ήταν κάτω από το νερό.",
    "hebrew": "הנהר עלה בלילה, ובבוקר היו השדות הנמוכים מתחת למים.",
    "arabic": "ارتفع النهر في الليل، وفي الصباح كانت الحقول المنخفضة تحت الماء.",
    "devanagari": "रात में नदी बढ़ गई और सुबह तक नीचे के खेत पानी में डूब गए।",
    "thai": "แม่น้ำเอ่อขึ้นในตอนกลางคืน และพอถึงเช้าทุ่งนาด้านล่างก็จมอยู่ใต้น้ำ",
    "hangul": "밤사이에 강물이 불어나 아침에는 아래쪽 밭이 물에 잠겼다.",
    "han": "夜里河水上涨，到了早晨，低处的田地都被水淹没了。",
    "kana": "夜のうちに川の水かさが増し、朝には低い畑が水の下になっていた。",
    "georgian": "ღამით მდინარე ადიდდა და დილით ქვედა მინდვრები წყლის ქვეშ იყო.",
    "code": "def area(w, h):\n    if w <= 0:\n        return [None]\n    return {h: w * h}[h]",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path("smollm2-mtp"))


@pytest.fixture(scope="module")
def scripts(tokenizer) -> tuple[list[str], torch.Tensor]:
    special = tokenizer.all_special_ids
    names, of_token = scripts_of(token_bytes(tokenizer, len(tokenizer)), special)
    return names, torch.tensor(of_token)


@pytest.mark.parametrize("script", TEXTS)
def test_the_tokens_of_a_text_tell_its_script(tokenizer, scripts, script):
    """smollm2's tokens cut the letters of most of these scripts into bytes."""
    names, of_token = scripts
    tokens = tokenizer(TEXTS[script], add_special_tokens=False)["input_ids"]
    assert dominant_script(Counter(names[i] for i in of_token[tokens])) == script


def test_the_control_other_tokens_tell_another_script(tokenizer, scripts):
    names, of_token = scripts
    tokens = tokenizer(TEXTS["cyrillic"], add_special_tokens=False)["input_ids"]
    shifted = Counter(names[i] for i in of_token.roll(1)[tokens])
    assert dominant_script(shifted) != "cyrillic"


@pytest.mark.parametrize(
    ("token", "script"),
    [
        (b" river", "latin"),
        ("ø".encode(), "latin"),
        ("水".encode(), "han"),
        ("水".encode()[:2], "han"),
        ("水".encode()[:1], "han"),
        ("水".encode()[1:], COMMON),  # bytes that end letters of every script
        ("ま".encode()[:2], "kana"),
        ("ま".encode()[:1], COMMON),  # as punctuation and Han begin, too
        ("д".encode()[:1], "cyrillic"),
        ("🙂".encode()[:2], COMMON),
        ("水w".encode(), COMMON),
        (b" 42", COMMON),
        (b"\n    ", "code"),
        (b" {};", "code"),
        (b"", COMMON),
    ],
)
def test_a_token_may_begin_or_end_within_a_letter(token, script):
    assert script_of(token) == script


def test_every_token_decodes_to_its_bytes(tokenizer):
    for text in TEXTS.values():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        bytes_of = token_bytes(tokenizer, len(tokenizer))
        assert b"".join(bytes_of[i] for i in ids).decode() == text


def test_sentencepiece_tokens_decode_to_their_bytes():
    class Sentencepiece:
        def get_vocab(self):
            return {"<s>": 0, "▁water": 1, "<0xE6>": 2, "水": 3}

        def get_added_vocab(self):
            return {"<s>": 0}

    found = token_bytes(Sentencepiece(), 5)
    assert found == [b"<s>", b" water", b"\xe6", "水".encode(), b""]
