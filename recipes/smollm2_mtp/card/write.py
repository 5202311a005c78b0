"""The target writes conversations until a store is full."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import typer
from safetensors.torch import load_file
from tqdm import tqdm

from recipes.smollm2_mtp.card.conversations import Conversations
from recipes.smollm2_mtp.card.decode import CardDecoder, Weights, masked, paged
from recipes.smollm2_mtp.card.store import Store
from sglang_ascend.training.generation.conversation import ChatTokens
from sglang_ascend.training.generation.generator import GenerateConfig
from sglang_ascend.training.targets.families import Target

Tensor = torch.Tensor
STEPS_AT_ONCE = 8  # between two looks at which rows are done
MOST_DISTANCE = 0.05


class Prompts:
    """What `recipes.smollm2_mtp.card.prompts` wrote, in order."""

    def __init__(self, path: Path, device: torch.device) -> None:
        tensors = load_file(path)
        rows = list(tensors["tokens"].long().split(tensors["lengths"].tolist()))
        self.tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        self.lengths = tensors["lengths"].long().to(device)
        self.used = 0

    def take(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """For each row of bool `own` a prompt's padded tokens and length, which is 0 where the
        model is to write its own; no more than `left` rows."""
        index = self.used + (~own).long().cumsum(0) - 1
        self.used += int((~own).sum())
        return self.tokens[index.clamp_min(0)], self.lengths[index.clamp_min(0)] * ~own

    @property
    def left(self) -> int:
        return len(self.lengths) - self.used


def write(
    target: Target,
    tokenizer,
    prompts: Path,
    config: GenerateConfig,
    capacity: int,
    seconds: float,
) -> Store:
    """Conversations of `capacity` tokens in all, or as many as there are after `seconds` or once
    the prompts are used up."""
    queue = Prompts(prompts, target.device)
    weights = Weights(target.read(target.tensors), dict(target.config.fields), target.device)
    chat = ChatTokens.of(target.folder, tokenizer)
    conversations = Conversations(weights, chat, config)
    store = Store(conversations, capacity)
    step = repeated_step(conversations)
    began, warm = time.monotonic(), conversations.num_warm
    with tqdm(total=capacity, unit="token", desc="write", mininterval=5) as bar:
        while time.monotonic() - began < seconds and queue.left >= config.rows:
            done = conversations.rows.done.nonzero()[:, 0]
            if len(done):
                if not store.add(conversations, done):
                    break
                own = torch.rand(len(done), device=done.device) < 2 * config.own_prompt_share
                conversations.begin(done, *queue.take(own & (done < warm)))
            step()
            bar.update(store.used - bar.n)
    return store


@torch.inference_mode()
def check(target: Target, store: Store, count: int = 16) -> float:
    """How far the hidden states of `count` conversations are from those of transformers' model, by
    norm: about 0.02, as bfloat16 products differ.

    Raises:
        ValueError: they are not of this model.
    """
    model = target.load_model(torch.bfloat16).model
    step = max(1, len(store.starts) // count)
    distances = []
    for index in range(0, len(store.starts), step):
        tokens, _, hidden = store.padded([index])
        size = tokens.shape[1]
        seen = torch.ones(1, 1, size, size, dtype=torch.bool, device=tokens.device).tril()
        wanted = model(tokens, attention_mask=seen).last_hidden_state[0, :-1].float()
        difference = (hidden[0, :-1].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        distances.append(difference.mean().item())
    if not max(distances) < MOST_DISTANCE:
        raise ValueError(f"hidden states are {max(distances):.3f} from the model's own.")
    return sum(distances) / len(distances)


def repeated_step(conversations: Conversations) -> Callable[[], None]:
    """A call that makes `STEPS_AT_ONCE` steps; on a GPU of a graph, by the faster attention."""

    def by_hand() -> None:
        for _ in range(STEPS_AT_ONCE):
            conversations.step()

    if conversations.head.device.type != "cuda":
        return by_hand
    decoder = conversations.decoder
    times = {attend: seconds_of(decoder, attend) for attend in (paged, masked)}
    for attend, taken in times.items():
        typer.echo(f"{attend.__name__} attention: {1000 * taken:.2f} ms a step without its head")
    decoder.attend = min(times, key=times.__getitem__)
    graph = captured(conversations)

    def by_graph() -> None:
        for _ in range(STEPS_AT_ONCE):
            graph.replay()

    return by_graph


def seconds_of(decoder: CardDecoder, attend: Callable[..., Tensor], repeats: int = 10) -> float:
    """What a step of rows takes that are half full."""
    decoder.attend = attend
    positions = torch.full_like(decoder.rows, decoder.max_length // 2)
    began = 0.0
    for repeat in range(3 + repeats):
        if repeat == 3:
            torch.cuda.synchronize()
            began = time.monotonic()
        decoder.step(decoder.rows, positions)
    torch.cuda.synchronize()
    return (time.monotonic() - began) / repeats


def captured(conversations: Conversations) -> torch.cuda.CUDAGraph:
    """A graph of one step. Three steps run before it, of rows that are done: they change nothing
    but what a row that begins writes again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            conversations.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        conversations.step()
    return graph
