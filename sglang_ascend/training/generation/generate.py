"""Self-generation: the target writes user turns and replies; its tokens and hiddens become shards.

Continuous batching, one token per row and step: a row either is fed a forced token or samples.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from sglang_ascend.training.generation.conversation import (
    FORCED,
    REPLY,
    USER,
    ChatTokens,
    Conversation,
)
from sglang_ascend.training.generation.outputs import sample
from sglang_ascend.training.generation.prompts import prompt_key, templated_prompts
from sglang_ascend.training.generation.shards import read_prompt_list, write_shard
from sglang_ascend.training.targets.decoder import Decoder
from sglang_ascend.training.targets.families import Target

Tensor = torch.Tensor


@dataclass(frozen=True)
class GenerateConfig:
    """What to generate. Shares are probabilities per conversation."""

    rows: int = 96
    max_length: int = 320
    max_user_tokens: int = 64
    max_reply_tokens: int = 192
    own_prompt_share: float = 0.6
    second_turn_share: float = 0.1
    reply_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 1.0)
    user_min_p: float = 0.02
    sequences_per_shard: int = 128
    seed: int = 0
    dtype: str = "float32"  # of the target's products; "bfloat16" is several times faster with AMX


class Generator:
    """Runs conversations through a `Decoder` and yields the finished ones."""

    def __init__(
        self, target: Target, config: GenerateConfig, excluded: set[str], start: int = 0
    ) -> None:
        from transformers import AutoTokenizer

        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(target.folder)
        self.chat = ChatTokens.of(self.tokenizer)
        seed = config.seed * 100_000 + start  # `start`: shards already there
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.excluded = set(excluded)
        self.templated = templated_prompts(seed, self.excluded)
        self.decoder = Decoder(target, config.rows, config.max_length, getattr(torch, config.dtype))
        self.prefix_hidden = self._run_prefix()

    def _run_prefix(self) -> list[Tensor]:
        every = torch.ones(self.config.rows, dtype=torch.long)
        hidden = []
        for position, token in enumerate(self.chat.prefix[:-1]):
            hidden.append(self.decoder.step(every * token, every * position)[0].bfloat16())
        self.decoder.cache.share_prefix(len(hidden))
        return hidden

    def _start(self) -> Conversation:
        config, chat = self.config, self.chat
        stages = deque([REPLY])
        prompt = None
        queue: list[int] = []
        if self.rng.random() < config.own_prompt_share:
            stages.appendleft(USER)
        else:
            prompt = next(self.templated)
            queue = self.tokenizer(prompt, add_special_tokens=False).input_ids
            queue = [*queue, *chat.to_reply]
        if self.rng.random() < config.second_turn_share:
            stages.extend([USER, REPLY])
        row = Conversation(
            tokens=list(chat.prefix),
            roles=[FORCED] * len(chat.prefix),
            queue=deque(queue),
            stages=stages,
            temperature=self.rng.choice(config.reply_temperatures),
            prompt=prompt,
            hidden=list(self.prefix_hidden),
        )
        row.stage_start = len(row.tokens)
        return row

    @torch.inference_mode()
    def run(self) -> Iterator[Conversation]:
        """Endlessly yields finished conversations, every token but the last with its hidden."""
        rows = [self._start() for _ in range(self.config.rows)]
        while True:
            tokens = torch.tensor([row.tokens[-1] for row in rows])
            positions = torch.tensor([len(row.tokens) - 1 for row in rows])
            hidden = self.decoder.step(tokens, positions)
            kept = hidden.bfloat16()
            for index, row in enumerate(rows):
                row.hidden.append(kept[index])
            sampling = [i for i, row in enumerate(rows) if not row.queue]
            drawn = self._sample(hidden[sampling], [rows[i] for i in sampling])
            for row in rows:
                if row.queue:
                    row.append(row.queue.popleft(), FORCED)
                    row.stage_start = len(row.tokens)
            for index, token in zip(sampling, drawn, strict=True):
                state = self._advance(rows[index], token)
                if state == "finished":
                    yield rows[index]
                if state != "running":
                    rows[index] = self._start()

    def _sample(self, hidden: Tensor, rows: list[Conversation]) -> list[int]:
        """One token per row: greedy replies, sampled replies, user turns at T=1 with min-p."""
        if not rows:
            return []
        logits = self.decoder.logits(hidden)
        temperatures = torch.tensor([1.0 if row.role == USER else row.temperature for row in rows])
        user = torch.tensor([row.role == USER for row in rows]).nonzero()[:, 0]
        lowest = logits[user].amax(-1, keepdim=True) + math.log(self.config.user_min_p)
        logits[user] = logits[user].masked_fill(logits[user] < lowest, -torch.inf)
        return sample(logits, temperatures).tolist()

    def _advance(self, row: Conversation, token: int) -> str:
        """Appends a sampled token; returns running, finished or dropped."""
        role, config = row.role, self.config
        end = self.chat.end_of(role)
        length = len(row.tokens) - row.stage_start + 1
        limit = config.max_user_tokens if role == USER else config.max_reply_tokens
        if role == USER and length >= limit:
            token = end
        row.append(token, role)
        if role == REPLY and row.loops:
            cut = len(row.tokens) - len(row.repeats)
            del row.tokens[cut:], row.roles[cut:], row.hidden[cut:]
            return "finished" if cut - row.stage_start >= 16 else "dropped"
        if token != end:
            full = len(row.tokens) >= config.max_length or (role == REPLY and length >= limit)
            return "finished" if full else "running"
        row.stages.popleft()
        return self._next_stage(row, role)

    def _next_stage(self, row: Conversation, role: int) -> str:
        config = self.config
        if role == USER:
            prompt = self.tokenizer.decode(row.tokens[row.stage_start : -1])
            key = prompt_key(prompt)
            if key in self.excluded or len(key) < 8:
                return "dropped"
            self.excluded.add(key)
            row.prompt = row.prompt or prompt
            row.queue.extend(self.chat.following(role))
            return "running"
        room = config.max_length - len(row.tokens)
        if not row.stages or room < config.max_user_tokens + 64:
            return "finished"
        row.queue.extend(self.chat.following(role))
        row.repeats.clear()
        row.seen.clear()
        return "running"


def generate_shards(
    target: Target, out: Path, config: GenerateConfig, excluded: set[str], num_tokens: int
) -> None:
    """Adds shards of `config.seed` to `out` until that seed's hold `num_tokens` sampled tokens.

    After a kill the same call goes on behind the last whole shard, with a fresh random state.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = sorted(out.glob(f"shard-{config.seed:03d}-*.safetensors"))
    counted = sum(int((load_file(path)["roles"] != FORCED).sum()) for path in done)
    if counted >= num_tokens:
        return
    excluded = excluded | {prompt_key(prompt) for path in done for prompt in read_prompt_list(path)}
    generator = Generator(target, config, excluded, start=len(done))
    finished: list[Conversation] = []
    with tqdm(total=num_tokens, initial=counted, unit="token") as bar:
        for conversation in generator.run():
            finished.append(conversation)
            if len(finished) < config.sequences_per_shard:
                continue
            path = out / f"shard-{config.seed:03d}-{len(done):05d}.safetensors"
            written = write_shard(path, finished)
            done.append(path)
            finished = []
            counted += written
            bar.update(written)
            if counted >= num_tokens:
                return
