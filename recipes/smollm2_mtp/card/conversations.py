"""Conversations that advance on the device, all rows by one token a step, and no host value in it.

The rules are `sglang_ascend.training.generation.generator`'s; there each row is a Python object,
which some hundred rows have time for and some thousand have not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from recipes.smollm2_mtp.card.decode import CardDecoder, Weights
from sglang_ascend.training.generation.conversation import (
    FORCED,
    GRAM,
    REPEATED,
    REPLY,
    SHORTEST,
    USER,
    WINDOW,
    ChatTokens,
)
from sglang_ascend.training.generation.generator import GenerateConfig

Tensor = torch.Tensor


@dataclass
class Rows:
    """The state, [rows] each unless it says otherwise.

    Attributes:
        tokens, roles: int64, uint8 [rows, max_length].
        repeats: bool [rows, max_length], whether the 4-gram that ends there was there before.
        position: of the newest token, which the next step feeds.
        forced_end: how many tokens are there without having been sampled yet.
        stage_start: where the turn that is being sampled begins.
        role: whose turn that is.
        temperature: of the replies.
        turns: how many user turns come behind the present reply.
        length: of a conversation that is done; 0, one to be dropped.
    """

    tokens: Tensor
    roles: Tensor
    repeats: Tensor
    position: Tensor
    forced_end: Tensor
    stage_start: Tensor
    role: Tensor
    temperature: Tensor
    turns: Tensor
    done: Tensor
    length: Tensor

    @classmethod
    def empty(cls, rows: int, max_length: int, device: torch.device) -> Rows:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        tokens, roles = zeros(torch.long, max_length), zeros(torch.uint8, max_length)
        state = [zeros(torch.long) for _ in range(4)]
        return cls(
            tokens,
            roles,
            zeros(torch.bool, max_length),
            *state,
            temperature=zeros(torch.float32),
            turns=zeros(torch.long),
            done=~zeros(torch.bool),
            length=zeros(torch.long),
        )


class Conversations:
    """What a step does to every row that is not done, and how a row begins."""

    def __init__(self, weights: Weights, chat: ChatTokens, config: GenerateConfig) -> None:
        device = weights.embedding.device
        self.config, self.head = config, weights.embedding
        self.decoder = CardDecoder(weights, config.rows, config.max_length)
        self.rows = Rows.empty(config.rows, config.max_length, device)
        size = weights.config["hidden_size"]
        self.hidden = self.head.new_zeros(config.rows, config.max_length, size)
        self.prefix, self.to_reply, self.to_user = (
            torch.tensor(part, device=device) for part in (chat.prefix, chat.to_reply, chat.to_user)
        )
        self.num_warm = config.rows // 2
        self.random = torch.Generator().manual_seed(config.seed)
        self.rows.tokens[:, : len(chat.prefix)] = self.prefix
        self.rows.position.fill_(len(chat.prefix) - 1)  # which a done row feeds again and again
        self._feed_prefix()

    def _feed_prefix(self) -> None:
        every = self.decoder.rows
        for position, token in enumerate(self.prefix[:-1]):
            hidden = self.decoder.step(token.expand_as(every), torch.full_like(every, position))
            self.hidden[:, position] = hidden

    def begin(self, where: Tensor, prompts: Tensor, lengths: Tensor) -> None:
        """Rows `where` [n] begin again, with int64 `prompts` [n, width] of `lengths` [n] tokens
        each; one of none is a user turn that the model writes, in the first `num_warm` rows."""
        rows, config, device = self.rows, self.config, where.device
        own, warm, first = lengths == 0, where < self.num_warm, len(self.prefix)
        width = prompts.shape[1] + len(self.to_reply)
        turn = F.pad(prompts, (0, len(self.to_reply)))
        places = lengths[:, None] + torch.arange(len(self.to_reply), device=device)
        turn.scatter_(1, places, self.to_reply.expand(len(where), -1))
        rows.tokens[where, :first] = self.prefix
        rows.tokens[where, first : first + width] = turn
        rows.roles[where] = FORCED
        rows.position[where] = first - 1
        end = torch.where(own, first, first + lengths + len(self.to_reply))
        rows.forced_end[where] = rows.stage_start[where] = end
        rows.role[where] = torch.where(own, USER, REPLY)
        draws = torch.rand(len(where), 2, generator=self.random).to(device)
        choices = torch.tensor(config.reply_temperatures, device=device)
        rows.temperature[where] = choices[(draws[:, 0] * len(choices)).long()] * warm
        rows.turns[where] = (warm & (draws[:, 1] < config.second_turn_share)).long()
        rows.done[where] = False

    def step(self) -> None:
        """One token more for every row that is not done."""
        rows, every = self.rows, self.decoder.rows
        tokens = rows.tokens[every, rows.position]
        hidden = self.decoder.step(tokens, rows.position)
        self.hidden[every, rows.position] = hidden
        place = (rows.position + 1).clamp_max(self.config.max_length - 1)
        forced, user = rows.done | (place < rows.forced_end), rows.role == USER
        length = place + 1 - rows.stage_start
        token = self._sample(hidden, user)
        token = torch.where(user & (length >= self.config.max_user_tokens), self.to_reply[0], token)
        token = torch.where(forced, rows.tokens[every, place], token)
        rows.tokens[every, place] = token
        present = rows.roles[every, place]
        rows.roles[every, place] = torch.where(forced, present, rows.role.to(torch.uint8))
        looped = self._note_repeats(place, ~forced & ~user & (length >= GRAM))
        self._advance(place, length, forced, looped, token)

    def _sample(self, hidden: Tensor, user: Tensor) -> Tensor:
        """Greedy replies, drawn replies, user turns drawn at temperature 1 with min-p: the largest
        of logits / T + Gumbel noise is a draw of their softmax. Of all rows but the first
        `num_warm`, which alone may be drawn, the largest logit: noise costs as much as a layer."""
        logits, warm = F.linear(hidden, self.head), slice(self.num_warm)
        user, drawn = user[warm, None], logits[warm].float()
        lowest = drawn.amax(-1, keepdim=True) + math.log(self.config.user_min_p)
        drawn.masked_fill_(user & (drawn < lowest), -torch.inf)
        temperature = torch.where(user, 1.0, self.rows.temperature[warm, None])
        noise = torch.empty_like(drawn).exponential_().clamp_min_(1e-20).log_()
        drawn -= noise.mul_(temperature)
        return torch.cat((drawn.argmax(-1), logits[self.num_warm :].argmax(-1)))

    def _note_repeats(self, place: Tensor, counts: Tensor) -> Tensor:
        """Notes whether the 4-gram that ends at `place` was there before in this turn, of the rows
        that `counts`; which rows loop."""
        rows, every = self.rows, self.decoder.rows[:, None]
        starts = torch.arange(rows.tokens.shape[1] - GRAM + 1, device=place.device)
        newest = place[:, None] - GRAM + 1
        same = (starts >= rows.stage_start[:, None]) & (starts < newest)
        for offset in range(GRAM):
            shifted = rows.tokens[:, offset : offset + len(starts)]
            same &= shifted == rows.tokens[every, (newest + offset).clamp_min(0)]
        rows.repeats[self.decoder.rows, place] = same.any(1) & counts
        column = torch.arange(rows.tokens.shape[1], device=place.device)
        begin = torch.maximum(place - WINDOW + 1, rows.stage_start + GRAM - 1)[:, None]
        recent = rows.repeats & (column >= begin) & (column <= place[:, None])
        return counts & (recent.sum(1) >= REPEATED)

    def _advance(
        self, place: Tensor, length: Tensor, forced: Tensor, looped: Tensor, token: Tensor
    ) -> None:
        rows, config = self.rows, self.config
        user = rows.role == USER
        ended = ~forced & ~looped & (token == torch.where(user, self.to_reply[0], self.to_user[0]))
        full = place + 1 >= config.max_length
        full |= ~user & (length >= config.max_reply_tokens)
        room = config.max_length - place - 1
        too_short = user & ended & (length <= 2)
        to_reply = user & ended & ~too_short & ~full
        to_user = ~user & ended & ~full & (rows.turns > 0) & (room >= config.max_user_tokens + 64)
        self._follow(place, to_reply, self.to_reply[1:], REPLY)
        self._follow(place, to_user, self.to_user[1:], USER)
        rows.turns.sub_(to_user.long())
        finished = ~forced & (looped | full | too_short | (ended & ~to_reply & ~to_user))
        # A loop's own 4-grams go; what is left of the reply is kept if it says something.
        cut = place + 1 - (length - GRAM + 1).clamp_max(WINDOW)
        kept = torch.where(cut - rows.stage_start >= SHORTEST, cut, 0)
        whole = torch.where(too_short | user & full, 0, place + 1)
        rows.length.copy_(torch.where(finished, torch.where(looped, kept, whole), rows.length))
        rows.done |= finished
        rows.position.copy_(torch.where(rows.done, rows.position, place))

    def _follow(self, place: Tensor, where: Tensor, forced: Tensor, role: int) -> None:
        """Behind `place`, rows `where` are fed `forced`; then it is the turn of `role`."""
        rows, every = self.rows, self.decoder.rows[:, None]
        places = place[:, None] + 1 + torch.arange(len(forced), device=place.device)
        places = places.clamp_max(rows.tokens.shape[1] - 1)
        present = rows.tokens[every, places]
        rows.tokens[every, places] = torch.where(where[:, None], forced, present)
        present = rows.roles[every, places]
        rows.roles[every, places] = torch.where(where[:, None], FORCED, present)
        end = place + 1 + len(forced)
        rows.forced_end.copy_(torch.where(where, end, rows.forced_end))
        rows.stage_start.copy_(torch.where(where, end, rows.stage_start))
        rows.role.copy_(torch.where(where, role, rows.role))
