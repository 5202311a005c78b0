"""One conversation in progress: what is fed, what is sampled, and when a reply loops."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor

# Who wrote a token: the template, the model as user, the model as assistant, someone else.
FORCED, USER, REPLY, TEXT = 0, 1, 2, 3
GRAM, WINDOW, REPEATED = 4, 24, 16  # a reply loops when 16 of its last 24 4-grams are repetitions
SHORTEST = 16  # tokens of a reply that is kept, of which a loop was cut


@dataclass(frozen=True)
class ChatTokens:
    """The token ids of the chat template's fixed parts."""

    prefix: list[int]  # up to the first user turn
    to_reply: list[int]  # between a user turn and its reply
    to_user: list[int]  # between a reply and the next user turn
    has_turns: bool = True  # False: a reply is what continues a prompt, and nothing comes after it

    @classmethod
    def of(cls, tokenizer) -> ChatTokens:
        """Reads the parts from the template by rendering one two-turn conversation; without a
        template a prompt begins as the tokenizer begins a text, and the text's end ends its reply.

        Raises:
            ValueError: the template has no such parts, or there is no token that ends a text.
        """
        if not tokenizer.chat_template:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    f"the tokenizer of {tokenizer.name_or_path} has neither a chat template nor "
                    "an eos_token: name one in its tokenizer_config.json."
                )
            # What the tokenizer puts before a text of its own accord, such as <s>.
            begin = [i for i in tokenizer("").input_ids if i != tokenizer.eos_token_id]
            return cls(begin, [], [tokenizer.eos_token_id], has_turns=False)
        mark = "\x00"
        turn = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
        parts = tokenizer.apply_chat_template(turn + turn[:1], tokenize=False).split(mark)
        if len(parts) != 4 or not all(parts[:3]):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} does not enclose its turns: pass "
                "a target whose tokenizer_config.json has a template with user and assistant."
            )
        return cls(*(tokenizer(part, add_special_tokens=False).input_ids for part in parts[:3]))

    def end_of(self, role: int) -> int:
        """The token that ends a turn of USER or REPLY: the first of what follows it."""
        return (self.to_reply if role == USER else self.to_user)[0]

    def following(self, role: int) -> list[int]:
        """What is fed after that token, up to the next turn."""
        return (self.to_reply if role == USER else self.to_user)[1:]


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
    repeats: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def role(self) -> int:
        """FORCED while the queue lasts, then the stage being sampled."""
        return FORCED if self.queue else self.stages[0]

    def append(self, token: int, role: int) -> None:
        """Adds a token and notes whether its 4-gram occurred before in this stage."""
        self.tokens.append(token)
        self.roles.append(role)
        if role == REPLY and len(self.tokens) - self.stage_start >= GRAM:
            gram = tuple(self.tokens[-GRAM:])
            self.repeats.append(gram in self.seen)
            self.seen.add(gram)

    @property
    def loops(self) -> bool:
        """Whether `REPEATED` of the last `WINDOW` n-grams are repetitions."""
        return sum(self.repeats) >= REPEATED
