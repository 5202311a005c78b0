"""Owns nano-deepseek's self-generation: continuations, greedy and sampled, of the corpus's text."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from recipes.nano_deepseek.pretrain import CONVERSATIONS
from recipes.nano_deepseek.text.tokenizer import ASSISTANT_ID, BOS_ID, END_ID
from sglang_ascend.training.generation.conversation import FORCED, REPLY, Conversation
from sglang_ascend.training.generation.outputs import continue_prompts
from sglang_ascend.training.generation.shards import write_shard
from sglang_ascend.training.targets.families import Target

# Shares of the prompts. Prose and code are few: this target cannot write them well anyway.
PROMPTS = {
    "maths": 0.4,
    "chat": 0.36,
    "austen": 0.06,
    "python_code": 0.06,
    "python_docs": 0.04,
    "factbook": 0.04,
    "wordnet": 0.02,
    "diagnostics": 0.02,
}
TEXT_PROMPT_TOKENS = 48
MAX_PROMPT_TOKENS = 96
MAX_NEW_TOKENS = 112
# Half greedy: that is how acceptance is promised. The rest keeps drafts useful under sampling.
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
ROWS = 250


def conversation_prompts(tokens: np.ndarray, rng: np.random.Generator) -> Iterator[list[int]]:
    """Endless prompts that end with <|assistant|>: a document up to one of its questions."""
    bounds = np.append(np.flatnonzero(tokens == BOS_ID), len(tokens))
    while True:
        index = rng.integers(0, len(bounds) - 1)
        document = tokens[bounds[index] : bounds[index + 1]]
        end = int(rng.choice(np.flatnonzero(document == ASSISTANT_ID))) + 1
        if end <= MAX_PROMPT_TOKENS:
            yield document[:end].tolist()


def text_prompts(tokens: np.ndarray, rng: np.random.Generator) -> Iterator[list[int]]:
    """Endless windows of `TEXT_PROMPT_TOKENS` tokens from anywhere."""
    while True:
        start = int(rng.integers(0, len(tokens) - TEXT_PROMPT_TOKENS))
        yield tokens[start : start + TEXT_PROMPT_TOKENS].tolist()


def corpus_prompts(
    corpus: Path, split: str, part: str, rng: np.random.Generator
) -> Iterator[list[int]]:
    tokens = np.load(corpus / f"{part}.{split}.npy")
    return (conversation_prompts if part in CONVERSATIONS else text_prompts)(tokens, rng)


def to_conversation(
    tokens: Tensor, hidden: Tensor, prompt_length: int, temperature: float
) -> Conversation:
    """The record that `write_shard` takes; only generated tokens are trained on."""
    return Conversation(
        tokens=tokens.tolist(),
        roles=[FORCED] * prompt_length + [REPLY] * (len(tokens) - prompt_length),
        queue=deque(),
        stages=deque(),
        temperature=temperature,
        hidden=list(hidden.bfloat16()),
    )


def generate_shard(target: Target, corpus: Path, path: Path, num_prompts: int, seed: int) -> int:
    """Write one shard of continuations of training prompts; return its number of new tokens."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for part, share in PROMPTS.items():
        source = corpus_prompts(corpus, "train", part, rng)
        prompts += [next(source) for _ in range(round(share * num_prompts))]
    prompts.sort(key=len)  # rows of one batch are fed until the longest has ended
    conversations = []
    for start in range(0, len(prompts), ROWS):
        batch = prompts[start : start + ROWS]
        temperatures = torch.from_numpy(rng.choice(TEMPERATURES, len(batch))).float()
        rows = continue_prompts(target, batch, [END_ID], MAX_NEW_TOKENS, temperatures, generator)
        conversations += [
            to_conversation(tokens, hidden, len(prompt), temperature)
            for prompt, (tokens, hidden), temperature in zip(
                batch, rows, temperatures.tolist(), strict=True
            )
        ]
    return write_shard(path, conversations)


def main(
    corpus: Annotated[Path, typer.Option(help="Folder encoded by text.tokenizer.")],
    target: Annotated[Path, typer.Option(help="Checkpoint folder of the trained target.")],
    out: Annotated[Path, typer.Option(help="Where the shards go.")],
    shards: Annotated[int, typer.Option(help="Number of shards; existing ones are kept.")] = 1,
    prompts: Annotated[int, typer.Option(help="Prompts in a shard.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of prompts and samples.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Let the target continue training prompts; the NextN layer learns from what it wrote."""
    torch.set_num_threads(threads)
    opened = Target.open(target)
    out.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        path = out / f"{seed:02}-{shard:03}.safetensors"
        if not path.exists():
            tokens = generate_shard(opened, corpus, path, prompts, seed * 1000 + shard)
            typer.echo(json.dumps({"shard": path.name, "new_tokens": tokens}))


if __name__ == "__main__":
    typer.run(main)
