"""Self-generation: the target writes user turns and replies; its tokens and hiddens become shards.

Continuous batching, one token per row and step: a row either is fed a forced token or samples.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_ascend.training.generation.conversation import (
    FORCED,
    REPLY,
    SHORTEST,
    USER,
    ChatTokens,
    Conversation,
)
from sglang_ascend.training.generation.outputs import sample
from sglang_ascend.training.generation.prompts import (
    prompt_key,
    templated_prompts,
    vocabulary_words,
)
from sglang_ascend.training.targets.decoder import Decoder
from sglang_ascend.training.targets.families import Target

Tensor = torch.Tensor
SHORTEST_PROMPT = 8  # tokens for which there must be room: few prompts are shorter
MAX_DROPPED = 512  # conversations behind each other: no more of them will be kept


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
        self,
        target: Target,
        config: GenerateConfig,
        excluded: set[str],
        start: int = 0,
        prompts: Sequence[str] | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(target.folder)
        self.chat = ChatTokens.of(target.folder, self.tokenizer)
        if self.room < SHORTEST_PROMPT:
            raise ValueError(
                f"of {config.max_length} tokens, the reply's among them, the chat template of "
                f"{self.tokenizer.name_or_path} leaves {max(0, self.room)} to a prompt: take a "
                "larger --max-length, or a template with a shorter system prompt."
            )
        seed = config.seed * 100_000 + start  # `start`: shards already there
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.excluded = set(excluded)
        if prompts is None:
            topics = vocabulary_words(self.tokenizer)
            self.prompts = self._fitting(templated_prompts(seed, self.excluded, topics))
        else:
            self.prompts = self._fitting(self._noted(prompts))
        self.num_kept = self.num_dropped = self.num_too_long = 0
        self._dropped_since = 0  # one was kept
        self.decoder = Decoder(target, config.rows, config.max_length, getattr(torch, config.dtype))
        self.prefix_hidden = self._run_prefix()

    def _run_prefix(self) -> list[Tensor]:
        every = torch.ones(self.config.rows, dtype=torch.long)
        hidden = []
        for position, token in enumerate(self.chat.prefix[:-1]):
            hidden.append(self.decoder.step(every * token, every * position)[0].bfloat16().cpu())
        self.decoder.cache.share_prefix(len(hidden))
        return hidden

    def _noted(self, prompts: Sequence[str]) -> Iterator[str]:
        """`prompts`, none of which will be a user turn of the target's own."""
        for prompt in prompts:
            self.excluded.add(prompt_key(prompt))
            yield prompt

    @property
    def room(self) -> int:
        """Tokens of the longest prompt that leaves room for a reply."""
        longest = self.config.max_length
        room = longest - min(longest, self.config.max_reply_tokens) // 4
        return room - len(self.chat.prefix) - len(self.chat.to_reply)

    def _fitting(self, prompts: Iterable[str]) -> Iterator[str]:
        """Those that leave room for a reply."""
        for prompt in prompts:
            if len(self.tokenizer(prompt, add_special_tokens=False).input_ids) <= self.room:
                yield prompt
            else:
                self.num_too_long += 1

    def _start(self) -> Conversation | None:
        """A new conversation; None once there is no prompt left for it."""
        config, chat = self.config, self.chat
        stages = deque([REPLY])
        prompt = None
        queue: list[int] = []
        if chat.has_turns and self.rng.random() < config.own_prompt_share:
            stages.appendleft(USER)
        else:
            prompt = next(self.prompts, None)
            if prompt is None:
                return None
            queue = self.tokenizer(prompt, add_special_tokens=False).input_ids
            queue = [*queue, *chat.to_reply]
        if chat.has_turns and self.rng.random() < config.second_turn_share:
            stages.extend([USER, REPLY])
        first = list(chat.prefix) or [queue.pop(0)]
        row = Conversation(
            tokens=first,
            roles=[FORCED] * len(first),
            queue=deque(),
            stages=stages,
            temperature=self.rng.choice(config.reply_temperatures),
            prompt=prompt,
            hidden=list(self.prefix_hidden),
        )
        row.follow(queue)
        return row

    @torch.inference_mode()
    def run(self) -> Iterator[Conversation]:
        """Yields finished conversations, every token but the last with its hidden, until there is
        no prompt left, and the templates never end, or until it `ran_dry`.

        Raises:
            ValueError: nothing but loops is written.
        """
        rows = [self._start() for _ in range(self.config.rows)]
        while any(rows) and not self.ran_dry:
            # A row without a conversation is fed token 0 at its first position, for nobody.
            tokens = torch.tensor([row.tokens[-1] if row else 0 for row in rows])
            positions = torch.tensor([len(row.tokens) - 1 if row else 0 for row in rows])
            hidden = self.decoder.step(tokens, positions)
            kept = hidden.bfloat16().cpu()
            running = [(index, row) for index, row in enumerate(rows) if row]
            for index, row in running:
                row.hidden.append(kept[index])
            sampling = [(index, row) for index, row in running if not row.queue]
            places = torch.tensor([i for i, _ in sampling], dtype=torch.long).to(hidden.device)
            drawn = self._sample(hidden[places], [row for _, row in sampling])
            for _, row in running:
                if row.queue:
                    row.append(row.queue.popleft(), FORCED)
            for (index, row), token in zip(sampling, drawn, strict=True):
                state = self._advance(row, token)
                if state == "finished":
                    self.num_kept, self._dropped_since = self.num_kept + 1, 0
                    yield row
                if state == "dropped":
                    self._count_dropped()
                if state != "running":
                    rows[index] = self._start()

    @property
    def ran_dry(self) -> bool:
        """Whether it has long written nothing but loops, and user turns that it wrote before."""
        return self._dropped_since >= MAX_DROPPED

    def _count_dropped(self) -> None:
        self.num_dropped, self._dropped_since = self.num_dropped + 1, self._dropped_since + 1
        if self.ran_dry and not self.num_kept:
            raise ValueError(
                f"the first {MAX_DROPPED} conversations of {self.tokenizer.name_or_path} all loop "
                "or say nothing: pass a model that answers, or prompts that it can answer."
            )

    def _sample(self, hidden: Tensor, rows: list[Conversation]) -> list[int]:
        """One token per row: greedy replies, sampled replies, user turns at T=1 with min-p."""
        if not rows:
            return []
        logits = self.decoder.logits(hidden)
        temperatures = torch.tensor([1.0 if row.role == USER else row.temperature for row in rows])
        user = torch.tensor([row.role == USER for row in rows]).nonzero()[:, 0].to(logits.device)
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
            return "finished" if cut - row.stage_start >= SHORTEST else "dropped"
        if role == REPLY and token in self.chat.ends - {end}:
            return "finished"
        if token != end:
            full = len(row.tokens) >= config.max_length or (role == REPLY and length >= limit)
            # A user turn without an end is no prompt; behind a reply the conversation ends with it.
            whole = "finished" if row.prompt is not None else "dropped"
            return whole if full else "running"
        row.stages.popleft()
        return self._next_stage(row, role)

    def _next_stage(self, row: Conversation, role: int) -> str:
        config = self.config
        if role == USER:
            prompt = self.tokenizer.decode(row.tokens[row.stage_start : -1])
            key = prompt_key(prompt)
            if key in self.excluded or len(key) < 8:
                return "dropped"
            following = self.chat.following(role)
            if len(row.tokens) + len(following) >= config.max_length:
                return "dropped" if row.prompt is None else "finished"
            self.excluded.add(key)
            row.prompt = row.prompt or prompt
            row.follow(following)
            return "running"
        room = config.max_length - len(row.tokens)
        if not row.stages or room < config.max_user_tokens + 64:
            return "finished"
        row.follow(self.chat.following(role))
        row.repeats.clear()
        row.seen.clear()
        return "running"
