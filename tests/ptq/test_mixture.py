"""A mixture has exactly its ratios' texts, none twice, the same for a seed, and its manifest;
what cannot be mixed is refused in one sentence before anything is written."""

import json
from fractions import Fraction

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from sglang_ascend.cli import app
from sglang_ascend.ptq.mixture.sets import Mixture
from sglang_ascend.ptq.mixture.shares import allocate, parse_shares
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.layouts.ours import SIDE_FILE
from sglang_ascend.quantization.recipe import parse_recipe
from sglang_ascend.training.generation.prompts import DOMAINS, prompt_key
from sglang_ascend.training.targets.families import Target

RECIPE = """
spec:
  process:
    - type: linear_quant
      qconfig:
        weight: {scope: per_channel, dtype: int4, method: gptq}
      include: ["model.layers.1.mlp.experts.0.up_proj"]
"""


@pytest.fixture
def chinese(tmp_path):
    path = tmp_path / "zh.jsonl"
    rows = [{"prompt": f"{number} 加 2 等于多少？"} for number in range(6)]
    rows += [{"text": "床前明月光，疑是地上霜。"}, {"prompt": "3 加 2 等于多少"}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return path


@pytest.mark.parametrize("total", [1, 7, 10, 64, 257])
@pytest.mark.parametrize("ratios", [("0.4", "0.3", "0.3"), ("1/3", "1/3", "1/3"), ("0.05", "0.95")])
def test_counts_are_those_of_the_largest_remainder(ratios, total):
    exact = [Fraction(ratio) * total for ratio in ratios]
    found = allocate([Fraction(ratio) for ratio in ratios], total)
    assert sum(found) == total
    assert all(
        int(part) <= count <= int(part) + 1 for part, count in zip(exact, found, strict=True)
    )
    gained = [part - int(part) for part, c in zip(exact, found, strict=True) if c > int(part)]
    missed = [part - int(part) for part, c in zip(exact, found, strict=True) if c == int(part)]
    assert min(gained, default=1) >= max(missed, default=0)


def test_rows_are_those_of_their_set_and_none_is_there_twice(chinese):
    mixture = Mixture(f"code:0.4,maths:0.3,{chinese}:0.3", 20, seed=0)
    assert [part.count for part in mixture.parts] == [8, 6, 6]
    assert [len(part.rows) for part in mixture.parts] == [8, 6, 6]
    keys = [prompt_key(row.words) for part in mixture.parts for row in part.rows]
    assert len(set(keys)) == 20
    again = Mixture(f"code:0.4,maths:0.3,{chinese}:0.3", 20, seed=0)
    assert again.manifest == mixture.manifest and again.parts == mixture.parts
    other = Mixture(f"code:0.4,maths:0.3,{chinese}:0.3", 20, seed=1)
    assert other.parts[0].rows != mixture.parts[0].rows  # the control
    before = mixture.manifest["sets"][2]
    chinese.write_text(chinese.read_text().replace("5 加", "9 加"))
    after = Mixture(f"code:0.4,maths:0.3,{chinese}:0.3", 20, seed=0).manifest["sets"][2]
    assert {key for key in before if before[key] != after[key]} <= {"file_sha256", "rows_sha256"}
    assert before["file_sha256"] != after["file_sha256"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("code:0.4,maths:0.3", "sum to 0.7; make them sum to 1"),
        ("code:0.4,maths:0.6,own:0.1", "sum to 1.1"),
        ("code", "'code', which is no set and its ratio"),
        ("code:-1,maths:2", "'code:-1', which is no set"),
        (":1", "':1', which is no set"),
        ("code:1/0", "which is no set"),
        ("", "'', which is no set"),
        ("code:0.5,code:0.5", "names code twice"),
        ("french:1", "is neither one of own, code, maths"),
    ],
)
def test_wrong_ratios_and_unknown_sets_are_refused_in_one_sentence(words, reason):
    with pytest.raises(ValueError) as refusal:
        Mixture(words, 10, seed=0)
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"prompt": "a"}\n[]', "in line 2"),
        ('{"prompt": "a"}\n{"prompt": 3}', "in line 2"),
        ('{"prompt": ""}', "in line 1"),
        ("{", "in line 1"),
        ('{"text": "a"}\n{"text": "A!"}', "has 1 texts that no other set has and 4 are asked for"),
    ],
)
def test_files_without_texts_are_refused_and_nothing_is_written(content, reason, nano, tmp_path):
    path, recipe = tmp_path / "mine.jsonl", tmp_path / "recipe.yaml"
    path.write_text(content)
    recipe.write_text(RECIPE)
    command = ["quantize", str(nano), "--recipe", str(recipe), "--out", str(tmp_path / "out")]
    options = ["--calibration-texts", "4", "--calibrate", f"{path}:1"]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 2
    assert reason in result.stderr and result.stderr.count("\n") == 1
    assert sorted(item.name for item in tmp_path.iterdir()) == ["mine.jsonl", "recipe.yaml"]


def test_a_checkpoint_says_what_it_was_calibrated_on(chinese, nano, tmp_path):
    words = f"maths:0.5,{chinese}:0.5"
    task = Quantization(nano, parse_recipe(RECIPE, "r"), tmp_path / "out", 0, 4, words)
    task.run()
    recipe = json.loads((tmp_path / "out" / SIDE_FILE).read_text())["recipe"]
    assert recipe["calibration"] == Mixture(words, 4, seed=0).manifest
    assert task.run().already_done
    own = Quantization(nano, parse_recipe(RECIPE, "r"), tmp_path / "out", 0, 4)
    with pytest.raises(ValueError, match="is not what this recipe and seed make"):
        own.run()
    with pytest.raises(ValueError, match="calibrates nothing; leave out --calibrate"):
        plain = RECIPE.replace("gptq", "minmax")
        Quantization(nano, parse_recipe(plain, "r"), tmp_path / "b", 0, 4, words)


def test_texts_are_whole_or_replied_to(chinese, nano):
    texts = Mixture(f"own:0.5,{chinese}:0.5", 4, seed=3).texts(Target.open(nano))
    assert [text.domain == str(chinese) for text in texts] == [False, False, True, True]
    assert all(len(text.tokens) > text.prompt_length for text in texts)
    assert parse_shares("own:1")[0].name not in DOMAINS


def test_a_text_that_was_cut_amid_a_character_is_read(nano, tmp_path):
    """Half of an emoji, as JSON can hold it: no tokenizer takes that."""
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "2 + 3 \\ud83d"}\r\n\r\n{"text": "a \\ud83d b"}\r\n')
    texts = Mixture(f"{path}:1", 2, seed=0).texts(Target.open(nano))
    tokenizer = AutoTokenizer.from_pretrained(nano)
    assert "a \ufffd b" in [tokenizer.decode(text.tokens) for text in texts]
