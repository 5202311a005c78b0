"""Owns nano-deepseek's self-generation: prompts from the corpus, greedy and sampled continuations.

Rows of one batch have equal prompt lengths, so neither padding nor masks are needed.
"""

import json
import logging
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from sglang_ascend.training.deepseek import DeepseekForCausalLM, KeyValueCache
from sglang_ascend.training.generate import FORCED, REPLY, Conversation, write_shard
from sglang_ascend.training.nano_checkpoint import load_checkpoint
from sglang_ascend.training.pretrain import CONVERSATIONS
from sglang_ascend.training.tokenizer import ASSISTANT_ID, BOS_ID, END_ID

logger = logging.getLogger(__name__)

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
ROWS = 48


@dataclass(frozen=True)
class Generated:
    """Prompt and continuation [n], and the final-norm hidden of all tokens but the last."""

    tokens: list[int]
    prompt_length: int
    hidden: Tensor


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One token id for each row of fp32 [rows, vocabulary]; temperature 0 is greedy."""
    scaled = logits / temperatures.clamp_min(1e-6)[:, None]
    noise = torch.empty_like(logits).exponential_(generator=generator)
    drawn = (scaled.softmax(-1) / noise).argmax(-1)
    return torch.where(temperatures > 0, drawn, logits.argmax(-1))


@torch.inference_mode()
def generate_batch(
    model: DeepseekForCausalLM,
    prompts: Tensor,
    temperatures: Tensor,
    generator: torch.Generator,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Generated]:
    """Continue int64 [rows, length] until every row has emitted END or `max_new_tokens`."""
    caches = [KeyValueCache() for _ in model.model.layers]
    hidden = [model.hidden_states(prompts, 0, caches)]
    tokens, length = prompts, prompts.shape[1]
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    while True:
        following = sample(model.lm_head(hidden[-1][:, -1]), temperatures, generator)
        tokens = torch.cat([tokens, following[:, None]], 1)
        ended |= following == END_ID
        if ended.all() or tokens.shape[1] == length + max_new_tokens:
            break
        hidden.append(model.hidden_states(following[:, None], tokens.shape[1] - 1, caches))
    states = torch.cat(hidden, 1)
    return [_cut(row, length, state) for row, state in zip(tokens.tolist(), states, strict=True)]


def _cut(tokens: list[int], prompt_length: int, hidden: Tensor) -> Generated:
    """Drop what follows the first END of the continuation."""
    if END_ID in tokens[prompt_length:]:
        tokens = tokens[: tokens.index(END_ID, prompt_length) + 1]
    return Generated(tokens, prompt_length, hidden[: len(tokens) - 1])


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


def equal_length_batches(prompts: list[list[int]]) -> Iterator[Tensor]:
    """Group prompts by length into int64 batches of at most `ROWS` rows."""
    by_length = defaultdict(list)
    for prompt in prompts:
        by_length[len(prompt)].append(prompt)
    for group in by_length.values():
        for start in range(0, len(group), ROWS):
            yield torch.tensor(group[start : start + ROWS])


def to_conversation(row: Generated, temperature: float) -> Conversation:
    """The record that `generate.write_shard` takes; only generated tokens are trained on."""
    new = len(row.tokens) - row.prompt_length
    return Conversation(
        tokens=row.tokens,
        roles=[FORCED] * row.prompt_length + [REPLY] * new,
        queue=deque(),
        stages=deque(),
        temperature=temperature,
        hidden=list(row.hidden.bfloat16()),
    )


def generate_shard(
    model: DeepseekForCausalLM, corpus: Path, path: Path, num_prompts: int, seed: int
) -> int:
    """Write one shard of continuations of training prompts; return its number of new tokens."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for part, share in PROMPTS.items():
        source = corpus_prompts(corpus, "train", part, rng)
        prompts += [next(source) for _ in range(round(share * num_prompts))]
    conversations = []
    for batch in tqdm(list(equal_length_batches(prompts)), desc=path.name, mininterval=5):
        temperatures = torch.from_numpy(rng.choice(TEMPERATURES, len(batch))).float()
        rows = generate_batch(model, batch, temperatures, generator)
        conversations += map(to_conversation, rows, temperatures.tolist())
    return write_shard(path, conversations)


def main(
    corpus: Annotated[Path, typer.Option(help="Folder encoded by training.tokenizer.")],
    target: Annotated[Path, typer.Option(help="Checkpoint folder of the trained target.")],
    out: Annotated[Path, typer.Option(help="Where the shards go.")],
    shards: Annotated[int, typer.Option(help="Number of shards; existing ones are kept.")] = 1,
    prompts: Annotated[int, typer.Option(help="Prompts in a shard.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of prompts and samples.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Let the target continue training prompts; the NextN layer learns from what it wrote."""
    torch.set_num_threads(threads)
    model, _ = load_checkpoint(target)
    out.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        path = out / f"{seed:02}-{shard:03}.safetensors"
        if not path.exists():
            tokens = generate_shard(model, corpus, path, prompts, seed * 1000 + shard)
            typer.echo(json.dumps({"shard": path.name, "new_tokens": tokens}))


if __name__ == "__main__":
    typer.run(main)
