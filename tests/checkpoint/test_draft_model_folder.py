"""A model may draft for another one where both call every token by the same id, it is of a family
that was served so, and its weights are whole. Each defect is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import WORDS, write_target

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.checkpoint.draft_model import validate_draft_model
from sglang_ascend.checkpoint.draft_model.vocabulary import num_tokens, token_ids

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target", "LlamaForCausalLM", vocab_size=24)
    write_target(folder / "draft", "Qwen3ForCausalLM", vocab_size=16, hidden_size=16)
    return folder


@pytest.fixture
def models(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "models"))


def edited(name: str, **fields: Any) -> Change:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def with_words(words: list[str]) -> Change:
    vocabulary = {word: i for i, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}
    return edited("tokenizer.json", model=model)


def with_not_a_number(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, folder / "model.safetensors")


REFUSED: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "two words are swapped": (
        "draft",
        with_words([*WORDS[:-2], *WORDS[:-3:-1]]),
        ("--speculative-draft-model-path", "2 tokens differ", "same tokenizer"),
    ),
    "a token more": (
        "draft",
        with_words([*WORDS, "more"]),
        ("another vocabulary", "1 tokens differ, such as 'more': 10 and none", "same tokenizer"),
    ),
    "a token less": ("target", with_words([*WORDS, "more"]), ("'more': none and 10",)),
    "an added token of another id": (
        "draft",
        edited("tokenizer.json", added_tokens=[{"id": 8, "content": WORDS[2]}]),
        ("1 tokens differ",),
    ),
    "no tokenizer": ("draft", without("tokenizer.json"), ("tokenizer.json is missing", "save")),
    "no tokenizer of the target": ("target", without("tokenizer.json"), ("is missing", "save")),
    "a tokenizer without a vocabulary": (
        "draft",
        edited("tokenizer.json", model={}),
        ("tokenizer.json", "does not hold a vocabulary", "download it again"),
    ),
    "ids that are none": (
        "draft",
        edited("tokenizer.json", model={"vocab": {"a": "b"}}),
        ("does not hold a vocabulary of ids",),
    ),
    "a family that was not tried": (
        "draft",
        edited("config.json", architectures=["GemmaForCausalLM"]),
        ("is a GemmaForCausalLM", "LlamaForCausalLM", "pass one of these"),
    ),
    "another model_type": (
        "draft",
        edited("config.json", model_type="qwen2"),
        ("has model_type qwen2", "set it to qwen3"),
    ),
    "what the step has not": (
        "draft",
        edited("config.json", use_sliding_window=True),
        ("--speculative-draft-model-path", "use_sliding_window"),
    ),
    "quantized": (
        "draft",
        edited("config.json", quantization_config={"quant_method": "gptq"}),
        ("is quantized", "pass the checkpoint that it was made from"),
    ),
    "a quantized target": (
        "target",
        edited("config.json", quantization_config={"quant_method": "gptq"}),
        ("--model-path", "is quantized"),
    ),
    "no weights": ("draft", without("model.safetensors"), ("no .safetensors file",)),
    "a weight that is no number": ("draft", with_not_a_number, ("model.safetensors", "NaN")),
    "the same of the target": ("target", with_not_a_number, ("model.safetensors", "NaN")),
}


def test_a_model_of_the_same_tokens_and_another_size_is_accepted(models: Path) -> None:
    """Rows of embedding and head are 24 and 16, of which ten are tokens."""
    validate_draft_model(models / "target", models / "draft")
    assert num_tokens(models / "draft" / "tokenizer.json") == len(WORDS)


@pytest.mark.parametrize("case", REFUSED)
def test_a_defect_is_refused_in_one_sentence(models: Path, case: str) -> None:
    which, change, words = REFUSED[case]
    change(models / which)
    with pytest.raises(CheckpointError) as error:
        validate_draft_model(models / "target", models / "draft")
    sentence = str(error.value)
    assert "\n" not in sentence and ". " not in sentence
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (None, ("model of its own", "--speculative-draft-model-path")),
        ("organisation/name", ("no folder of this machine", "download it")),
        ("/nowhere/at/all", ("does not exist",)),
    ],
)
def test_a_draft_that_is_no_folder_is_refused(
    models: Path, path: str | None, words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as error:
        validate_draft_model(models / "target", path)
    assert all(word in str(error.value) for word in words)


def test_the_tokenizer_may_lie_elsewhere(models: Path) -> None:
    (models / "target" / "tokenizer.json").rename(models / "tokenizer.json")
    for path in (models, models / "tokenizer.json"):
        validate_draft_model(models / "target", models / "draft", tokenizer_path=path)


def test_a_list_of_tokens_and_scores_is_a_vocabulary(tmp_path: Path) -> None:
    """As unigram models of sentencepiece have it; an added token may replace one."""
    path = tmp_path / "tokenizer.json"
    vocabulary = [["<s>", 0.0], ["a", -1.5], ["b", -2.0]]
    added = [{"id": 3, "content": "<end>"}, {"id": 0, "content": "<s>"}]
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    assert token_ids(path) == {"<s>": 0, "a": 1, "b": 2, "<end>": 3}
