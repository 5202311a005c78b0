"""One conversation in progress: what is fed, what is sampled, and when a reply loops."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor

FORCED, USER, REPLY = 0, 1, 2  # who wrote a token: the template, the model as user, as assistant


@dataclass(frozen=True)
class ChatTokens:
    """The token ids of the chat template's fixed parts."""

    prefix: list[int]  # system turn and the first user header
    to_reply: list[int]  # after a user turn's end token: newline, assistant header
    to_user: list[int]  # after a reply's end token: newline, user header
    end: int

    @classmethod
    def of(cls, tokenizer) -> ChatTokens:
        """Reads the parts from the template by rendering one two-turn conversation."""
        turn = [{"role": "user", "content": "\x00"}, {"role": "assistant", "content": "\x00"}]
        text = tokenizer.apply_chat_template(turn + turn[:1], tokenize=False)
        prefix, to_reply, to_user, _ = text.split("\x00")
        end = tokenizer.eos_token

        def ids(part: str) -> list[int]:
            return tokenizer(part, add_special_tokens=False).input_ids

        return cls(
            ids(prefix),
            ids(to_reply.split(end, 1)[1]),
            ids(to_user.split(end, 1)[1]),
            tokenizer.eos_token_id,
        )


@dataclass
class Conversation:
    """One row: `queue` holds forced tokens, `stages` what to sample once it is empty."""

    tokens: list[int]
    roles: list[int]
    queue: deque[int]
    stages: deque[int]
    temperature: float
    prompt: str | None = None
    hidden: list[Tensor] = field(default_factory=list)
    stage_start: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    repeats: deque[bool] = field(default_factory=lambda: deque(maxlen=24))

    @property
    def role(self) -> int:
        """FORCED while the queue lasts, then the stage being sampled."""
        return FORCED if self.queue else self.stages[0]

    def append(self, token: int, role: int) -> None:
        """Adds a token and notes whether its 4-gram occurred before in this stage."""
        self.tokens.append(token)
        self.roles.append(role)
        if role == REPLY and len(self.tokens) - self.stage_start >= 4:
            gram = tuple(self.tokens[-4:])
            self.repeats.append(gram in self.seen)
            self.seen.add(gram)

    @property
    def loops(self) -> bool:
        """Whether 16 of the last 24 4-grams are repetitions."""
        return sum(self.repeats) >= 16
