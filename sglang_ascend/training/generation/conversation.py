"""One conversation in progress: what is fed, what is sampled, and when a reply loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_ascend.checkpoint.reader import read_json_object

Tensor = torch.Tensor

# Who wrote a token: the template, the model as user, the model as assistant, someone else.
FORCED, USER, REPLY, TEXT = 0, 1, 2, 3
GRAM, WINDOW, REPEATED = 4, 24, 16  # a reply loops when 16 of its last 24 4-grams are repetitions
SHORTEST = 16  # tokens of a reply that is kept, of which a loop was cut


def reply_ends(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokens at which a server of the checkpoint in `folder` ends a reply: the tokenizer's and
    those that config.json and generation_config.json name. Some families have several."""
    ends = {tokenizer.eos_token_id}
    for path in (folder / "config.json", folder / "generation_config.json"):
        named = read_json_object(path).get("eos_token_id") if path.exists() else None
        ends.update(named if isinstance(named, list) else [named])
    return frozenset(token for token in ends if isinstance(token, int))


@dataclass(frozen=True)
class ChatTokens:
    """The token ids of the chat template's fixed parts."""

    prefix: list[int]  # up to the first user turn
    to_reply: list[int]  # between a user turn and its reply, as a server asks for one
    to_user: list[int]  # from the token that ends a reply to the next user turn
    ends: frozenset[int]  # at which a server ends a reply, `to_user`'s first not always among them
    has_turns: bool = True  # False: a reply is what continues a prompt, and nothing comes after it

    @classmethod
    def of(cls, folder: Path, tokenizer: Any) -> ChatTokens:
        """Reads the parts from the template by rendering one two-turn conversation; without a
        template a prompt begins as the tokenizer begins a text, and the text's end ends its reply.

        Args:
            folder: of the checkpoint, whose server ends replies.

        Raises:
            ValueError: the template has no such parts, or there is no token that ends a text.
        """
        ends = reply_ends(folder, tokenizer)
        if not tokenizer.chat_template:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    f"the tokenizer of {tokenizer.name_or_path} has neither a chat template nor "
                    "an eos_token: name one in its tokenizer_config.json."
                )
            # What the tokenizer puts before a text of its own accord, such as <s>.
            begin = [i for i in tokenizer("").input_ids if i != tokenizer.eos_token_id]
            return cls(begin, [], [tokenizer.eos_token_id], ends, has_turns=False)
        mark = "\x00"
        turn = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
        # What leads to a reply is not what precedes one that was given: a thinking model's may not.
        asked = tokenizer.apply_chat_template(
            turn[:1], tokenize=False, add_generation_prompt=True
        ).split(mark)
        given = tokenizer.apply_chat_template(turn + turn[:1], tokenize=False).split(mark)
        if len(asked) != 2 or len(given) != 4 or not all([*asked, given[2]]):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} does not enclose its turns: pass "
                "a target whose tokenizer_config.json has a template with user and assistant."
            )
        prefix, to_reply, to_user = (
            tokenizer(part, add_special_tokens=False).input_ids for part in (*asked, given[2])
        )
        # A template may write a space before the token that ends a reply.
        end = next((i for i, token in enumerate(to_user) if token in ends), 0)
        return cls(prefix, to_reply, to_user[end:], ends)

    def end_of(self, role: int) -> int:
        """The token that ends a turn of USER or REPLY where another turn follows: its first."""
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

    def follow(self, tokens: Sequence[int]) -> None:
        """`tokens` are fed next, and the stage behind them begins."""
        self.queue.extend(tokens)
        self.stage_start = len(self.tokens) + len(tokens)

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
