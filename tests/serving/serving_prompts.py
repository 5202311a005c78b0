"""Prompts as token lists: held-out text, cut to any length, and the mix of the lossless test."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

Tokenizer = PreTrainedTokenizerBase

# Around the page sizes 16 and 128 and the chunk of 512, and the two ends.
RAGGED_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 400, 1500)


def token_stream(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[int]:
    """`length` tokens of the texts one after another, again from the first when they end."""
    tokens = [t for text in texts for t in tokenizer.encode(text + "\n", add_special_tokens=False)]
    return (tokens * (length // len(tokens) + 1))[:length]


def ragged_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """16 prompts of 1 to 1,500 tokens; no two share a prefix."""
    stream = token_stream(tokenizer, texts, 4 * max(RAGGED_LENGTHS))
    return [stream[7 * i : 7 * i + n] for i, n in enumerate(RAGGED_LENGTHS)]


def conversation(tokenizer: Tokenizer, *messages: str) -> list[int]:
    """User and assistant by turns, then the opening of the assistant's next reply."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def lossless_mix(
    tokenizer: Tokenizer, held_out: Mapping[str, Sequence[str]], count: int
) -> list[list[int]]:
    """`count` distinct prompts: half single questions, then conversations of three turns (each
    extends a question, so that a radix hit is certain), slices of text, noise, one to three tokens.
    """
    texts = [text for prompts in held_out.values() for text in prompts]
    rng = random.Random(0)
    rng.shuffle(texts)
    questions = [conversation(tokenizer, text) for text in texts[: count // 2]]
    stream = token_stream(tokenizer, texts, 20_000)

    def one_more() -> list[int]:
        kind = rng.randrange(8)
        if kind < 3:
            return conversation(tokenizer, *(rng.choice(texts) for _ in range(3)))
        if kind < 6:
            start, length = rng.randrange(len(stream) - 100), rng.randrange(4, 100)
            return stream[start : start + length]
        length = rng.randrange(4, 60) if kind == 6 else rng.randrange(1, 4)
        return [rng.randrange(tokenizer.vocab_size) for _ in range(length)]

    mix = {tuple(prompt): None for prompt in questions}
    while len(mix) < count:
        mix.setdefault(tuple(one_more()))
    return [list(prompt) for prompt in mix]
