"""`build-vocabulary` ranks by an independent count, reads what it wrote, and refuses in words."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from sglang_ascend.cli import app
from sglang_ascend.models.nano_deepseek import ARTIFACT
from sglang_ascend.speculative.vocabulary.file import (
    DraftVocabularyError,
    read_draft_vocabulary,
    read_vocabulary,
)
from sglang_ascend.training.generation.conversation import FORCED, REPLY
from sglang_ascend.training.vocabulary import sources as sources_module
from sglang_ascend.training.vocabulary.build import Builder
from sglang_ascend.training.vocabulary.sources import documents, parse_sources

VOCAB_SIZE = 4096
ENGLISH = "Tom has 12 apples and buys 30 more. How many apples does Tom have in all?\n"
RUSSIAN = "У Тома двенадцать яблок, и он покупает ещё тридцать. Сколько яблок у Тома?\n"
CHINESE = "小明有十二个苹果，又买了三十个。小明一共有多少个苹果？"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ARTIFACT)


def build(*arguments: object):
    command = ["build-vocabulary", str(ARTIFACT), *map(str, arguments)]
    return CliRunner().invoke(app, command)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("en.txt", "mixed.jsonl", "ru.txt")}
    paths["en.txt"].write_text(ENGLISH * 400, encoding="utf-8")
    paths["ru.txt"].write_text(RUSSIAN * 200, encoding="utf-8")
    rows = [{"text": CHINESE * 5}, {"messages": [{"role": "user", "content": RUSSIAN * 5}]}] * 30
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    paths["mixed.jsonl"].write_text("\n".join(lines), encoding="utf-8")
    return paths


def test_lists_hold_the_most_frequent_tokens_of_each_language(tokenizer, texts, tmp_path):
    """Without a name the script of each document is its language."""
    svg, out = tmp_path / "plot.svg", tmp_path / "out"
    asked = ("--text", f"en={texts['en.txt']}", "--text", texts["mixed.jsonl"])
    result = build(*asked, "--out", out, "--size", 20, "--svg", svg)
    assert result.exit_code == 0, result.output
    content = json.loads((out / "draft_vocabulary.json").read_text())
    lists = {row["name"]: row for row in content["languages"]}
    assert lists.keys() == {"en", "han", "cyrillic"}
    for name, text in (("en", ENGLISH * 400), ("han", CHINESE * 150), ("cyrillic", RUSSIAN * 150)):
        counts = Counter(tokenizer(text, add_special_tokens=False)["input_ids"])
        special = set(tokenizer.all_special_ids)
        best = sorted(counts.values(), reverse=True)[: 20 - len(special)]
        found = dict(zip(lists[name]["token_ids"], lists[name]["counts"], strict=True))
        assert special <= found.keys() and len(found) == 20
        wanted = sorted(n for i, n in found.items() if i not in special)
        # Documents are cut at lines, so a token across two lines may be counted apart.
        assert wanted[::-1] == pytest.approx(best, rel=0.02, abs=2)
    (english, _) = content["sources"]
    assert english["sha256"] == hashlib.sha256(texts["en.txt"].read_bytes()).hexdigest()
    assert "<polyline" in svg.read_text() and "en" in result.output


def test_the_written_file_is_read_by_language_and_as_one_list(texts, tmp_path):
    asked = ("--text", f"en={texts['en.txt']}", "--text", f"ru={texts['ru.txt']}")
    assert build(*asked, "--out", tmp_path).exit_code == 0
    vocabulary = read_vocabulary(tmp_path, VOCAB_SIZE)
    assert vocabulary is not None
    assert {one.name for one in vocabulary.languages} == {"en", "ru"}
    for one in vocabulary.languages:
        assert one.token_ids.tolist() == sorted(set(one.token_ids.tolist()))
    together = set().union(*(one.token_ids.tolist() for one in vocabulary.languages))
    union = read_draft_vocabulary(tmp_path, VOCAB_SIZE)
    assert union is not None and union.tolist() == sorted(together)


def test_a_file_of_one_list_is_read_as_before(tmp_path):
    (tmp_path / "draft_vocabulary.json").write_text('{"token_ids": [1, 5, 9]}')
    vocabulary = read_vocabulary(tmp_path, 10)
    assert vocabulary is not None and vocabulary.languages == ()
    assert vocabulary.token_ids.tolist() == [1, 5, 9]
    assert read_vocabulary(tmp_path / "nothing", 10) is None


@pytest.mark.parametrize("ids", [[1.5, 2.5], [True], [[1, 5]], ["1"], {"1": 5}, 5])
def test_a_list_of_other_than_integers_is_refused(tmp_path, ids):
    """Cut to integers, fractions would be other tokens."""
    (tmp_path / "draft_vocabulary.json").write_text(json.dumps({"token_ids": ids}))
    with pytest.raises(DraftVocabularyError, match=r'\{"token_ids": \[integers\]\}'):
        read_vocabulary(tmp_path, 10)


def test_of_shards_what_the_target_wrote_is_counted(tmp_path):
    tokens = torch.tensor([5] * 200 + [9] * 300, dtype=torch.int32)
    roles = torch.tensor([FORCED] * 200 + [REPLY] * 300, dtype=torch.uint8)
    lengths = torch.tensor([500], dtype=torch.int32)
    shard = {"tokens": tokens, "roles": roles, "lengths": lengths}
    save_file(shard, tmp_path / "shard.safetensors")
    assert build("--text", f"own={tmp_path}", "--out", tmp_path / "out").exit_code == 0
    (row,) = json.loads((tmp_path / "out/draft_vocabulary.json").read_text())["languages"]
    found = dict(zip(row["token_ids"], row["counts"], strict=True))
    assert found[9] == 300 and not found.get(5)


def test_text_of_a_folder_called_like_a_language_and_from_windows_is_counted(tmp_path):
    folder = tmp_path / "lang=en"
    folder.mkdir()
    cut = json.dumps({"text": ENGLISH + "\ud83d"})  # half of an emoji, which no tokenizer takes
    lines = ["\ufeff" + cut, *[json.dumps(ENGLISH)] * 60]
    (folder / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    result = build("--text", folder, "--text", f"en={folder}/a.jsonl", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "draft_vocabulary.json").read_text())
    assert {row["name"] for row in content["languages"]} == {"latin", "en"}


@pytest.mark.parametrize("language", ["[zh]", "[/zh]"])
def test_a_language_is_printed_by_its_name(language, texts, tmp_path):
    """Whatever rich would make of it."""
    result = build("--text", f"{language}={texts['en.txt']}", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    assert language in result.stdout


def test_a_language_with_too_little_text_is_said_to_have_no_list(texts, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text(CHINESE[:9], encoding="utf-8")
    asked = ("--text", f"en={texts['en.txt']}", "--text", f"zh={few}", "--text", few)
    result = build(*asked, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "zh has no list: its text has fewer than 100 tokens.\n" in result.stderr
    assert result.stderr.count("has no list") == 1  # nobody named han


def test_no_share_is_cut_to_the_width_of_a_terminal(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = build("--text", f"en={texts['en.txt']}", "--out", tmp_path / "out")
    assert result.exit_code == 0 and result.stdout.count("100.0") == 5 and "…" not in result.stdout


def test_a_text_of_one_line_is_many_documents(tmp_path, monkeypatch):
    """And is never read whole: a file may be larger than memory."""
    monkeypatch.setattr(sources_module, "LINE_CHARACTERS", 2_000)
    text = ENGLISH.replace("\n", " ") * 300
    (tmp_path / "one.txt").write_text(text)
    (source,) = parse_sources([str(tmp_path / "one.txt")])
    found = list(documents(source, lambda part: [ord(letter) for letter in part]))
    assert "".join(map(chr, (i for part in found for i in part))) == text
    assert max(map(len, found)) == 2_000


def test_the_place_that_is_not_utf8_counts_from_the_begin_of_the_file(tmp_path):
    line = ("\xe9" * 49 + "\n").encode()
    for name, count, rest in (("a.txt", 20_000, b"\xff"), ("b.txt", 400, b"\xe4\xb8")):
        (tmp_path / name).write_bytes(line * count + rest)
        result = build("--text", tmp_path / name, "--out", tmp_path / "out")
        assert f"{name} is not UTF-8 at byte {99 * count}: convert it" in result.stderr


def test_tokens_that_the_model_has_no_row_for_are_not_counted(tmp_path):
    """Such as a pad token that a tokenizer was given, or shards of another tokenizer."""
    tokens = torch.tensor([9] * 300 + [VOCAB_SIZE, 2 * VOCAB_SIZE], dtype=torch.int32)
    roles = torch.full((302,), REPLY, dtype=torch.uint8)
    lengths = torch.tensor([302], dtype=torch.int32)
    save_file({"tokens": tokens, "roles": roles, "lengths": lengths}, tmp_path / "a.safetensors")
    result = build("--text", f"own={tmp_path}", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "out/draft_vocabulary.json").read_text())["languages"]
    assert row["counted_tokens"] == 300


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "holds no text"),
        ("latin1.txt", "façade".encode("latin-1"), "is not UTF-8 at byte 2"),
        ("broken.jsonl", b'{"text": "a"}\n{', "broken.jsonl:2 is not JSON"),
        ("other.jsonl", b'{"number": 3}', "has no text"),
        ("a.safetensors", b"nothing", "is no shard"),
        ("image.png", b"x", "is none of"),
        ("short.txt", b"one word", "too few tokens"),
    ],
)
def test_text_that_cannot_be_counted_is_refused_in_one_sentence(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    result = build("--text", tmp_path / name, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert words in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out/draft_vocabulary.json").exists()


def test_a_missing_tokenizer_and_missing_text_are_refused_in_one_sentence(tmp_path, texts):
    nothing = tmp_path / "nothing"
    asked = ["build-vocabulary", str(nothing), "--text", str(texts["en.txt"]), "--out", "o"]
    for result in (CliRunner().invoke(app, asked), build("--text", nothing, "--out", "o")):
        assert result.exit_code == 2 and str(nothing) in result.stderr
        assert result.stderr.count("\n") == 1
    (wrong := tmp_path / "wrong").mkdir()
    fields = {"model_type": "qwen2", "vocab_size": None}  # transformers has an exception for it
    (wrong / "config.json").write_text(json.dumps(fields))
    result = CliRunner().invoke(app, [asked[0], str(wrong), *asked[2:]])
    assert result.exit_code == 2 and f"{wrong} has no tokenizer and config.json" in result.stderr


def test_what_cannot_be_written_is_refused_before_anything_is_counted(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(Builder, "count", lambda *_: pytest.fail("counted"))
    asked, file, folder = ("--text", texts["en.txt"]), texts["ru.txt"], tmp_path / "out"
    for words, named in (
        (("--out", file), file),
        (("--out", "/proc"), "--out /proc/draft_vocabulary.json"),
        (("--out", folder, "--svg", file / "plot.svg"), file),
        (("--out", folder, "--svg", tmp_path), f"--svg {tmp_path} is a folder"),
    ):
        result = build(*asked, *words)
        assert result.exit_code == 2 and str(named) in result.stderr, result.exception
        assert result.stderr.count("\n") == 1


LISTS = {
    "languages": [{"name": "en", "token_ids": [3, 1], "counts": [9, 2]}],
    "scripts": {"names": ["latin"], "of_token": [0] * 10},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"languages": []}, "must have a language"),
        ({"scripts": {"names": ["latin"], "of_token": [0] * 9}}, "each of 10 tokens"),
        ({"scripts": {"names": ["latin"], "of_token": [1] * 10}}, "each of 10 tokens"),
        ({"languages": [{"name": "en", "token_ids": [3, 3], "counts": [1, 1]}]}, "distinct"),
        ({"languages": [{"name": "en", "token_ids": [3, 10], "counts": [1, 1]}]}, "below 10"),
        ({"languages": [{"name": "en", "token_ids": [3, 1], "counts": [1]}]}, "a count for each"),
        ({"languages": [{"name": "en", "token_ids": [3, 1]}]}, "KeyError"),
        ({"languages": [{"name": "en", "token_ids": 3, "counts": 1}]}, "TypeError"),
        ({"languages": [{"name": "en", "token_ids": [1, 3], "counts": [9.0, 2.5]}]}, "TypeError"),
        ({"languages": [{**LISTS["languages"][0], "token_ids": list(range(7)), "counts": [1] * 7}] * 2}, "lower --size"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, change, words):
    path = tmp_path / "draft_vocabulary.json"
    path.write_text(json.dumps(LISTS))
    assert read_vocabulary(tmp_path, 10) is not None
    path.write_text(json.dumps({**LISTS, **change}))
    with pytest.raises(DraftVocabularyError, match=words) as caught:
        read_vocabulary(tmp_path, 10)
    assert str(path) in str(caught.value)


def test_lists_that_are_refused_leave_the_file_that_is_there(tokenizer, texts, tmp_path):
    build("--text", texts["en.txt"], "--out", tmp_path, "--size", 20)
    path = tmp_path / "draft_vocabulary.json"
    before = path.read_bytes()
    builder = Builder(ARTIFACT)
    counted = builder.count(parse_sources([str(texts["en.txt"])]), lambda source, number: None)
    builder.vocab_size -= 1  # the lists are of another tokenizer
    with pytest.raises(
        DraftVocabularyError, match="build it with this model's tokenizer"
    ) as caught:
        builder.write(tmp_path, *counted, size=20)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir() if "draft" in one.name] == [path.name]
