"""The text that nano-deepseek was trained on is the text that its chat template makes."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.nano_deepseek.text import tokenizer as recipe
from recipes.nano_deepseek.text.corpus import chat_document
from sglang_ascend.models.nano_deepseek import ARTIFACT

TURNS = [("What is 3 + 4?", "3 + 4 = 7.\n#### 7"), ("你好，我叫Li。", "你好，Li！")]
SAMPLES = ("  two  spaces\n\n\ttab", "naïve façade — 北京 🙂", "1234567", "<|user|>hi<|assistant|>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(ARTIFACT)


def test_a_training_document_is_the_rendered_conversation(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [
        {"role": role, "content": text}
        for turn in TURNS
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == recipe.BOS + chat_document(TURNS)


def test_a_question_ends_where_the_answer_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    message = [{"role": "user", "content": TURNS[0][0]}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert (recipe.BOS + chat_document(TURNS)).startswith(prompt)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids[:2] == [recipe.BOS_ID, recipe.USER_ID]
    assert ids[-1] == recipe.ASSISTANT_ID


def test_special_tokens_have_the_ids_that_the_config_names(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tokenizer.convert_tokens_to_ids(list(recipe.SPECIAL_TOKENS))
    assert ids == list(range(len(ids)))
    assert tokenizer.eos_token_id == recipe.END_ID
    assert len(tokenizer) == recipe.VOCAB_SIZE


@pytest.mark.parametrize("text", SAMPLES)
def test_every_text_survives_encoding(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer("90817", add_special_tokens=False)["input_ids"]) == 5
