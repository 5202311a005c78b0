"""Finished conversations on the device, one behind another: tokens, writers, hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from recipes.smollm2_mtp.card.conversations import Conversations
from sglang_ascend.training.generation.conversation import USER
from sglang_ascend.training.generation.prompts import prompt_key

Tensor = torch.Tensor


class Store:
    """Room for `capacity` tokens. The prefix that every conversation has is there once, but for its
    last token, as the first `shared` rows.

    Attributes:
        tokens, roles, hidden: int32, uint8 [capacity], bf16 [capacity, hidden_size].
        starts, lengths: of each conversation, where it begins behind the prefix and how long it is
            with it.
    """

    def __init__(self, conversations: Conversations, capacity: int) -> None:
        state, hidden = conversations.rows, conversations.hidden
        self.shared = len(conversations.prefix) - 1
        self.tokens = hidden.new_zeros(capacity, dtype=torch.int32)
        self.roles = hidden.new_zeros(capacity, dtype=torch.uint8)
        self.hidden = hidden.new_empty(capacity, hidden.shape[-1])
        self.tokens[: self.shared] = conversations.prefix[:-1]
        self.hidden[: self.shared] = hidden[0, : self.shared]
        self.used = self.shared
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.column = torch.arange(state.tokens.shape[1], device=hidden.device)

    def add(self, conversations: Conversations, where: Tensor) -> bool:
        """Takes the conversations of rows `where` that are kept; False once there is no room."""
        state = conversations.rows
        lengths = state.length[where]
        where, lengths = where[lengths > 0], lengths[lengths > 0]
        own = (self.column >= self.shared) & (self.column < lengths[:, None])
        sizes = (lengths - self.shared).tolist()
        end = self.used + sum(sizes)
        if end > len(self.tokens):
            return False
        new = slice(self.used, end)
        self.tokens[new] = state.tokens[where][own].int()
        self.roles[new] = state.roles[where][own]
        self.hidden[new] = conversations.hidden[where][own]
        for size in sizes:
            self.starts.append(self.used)
            self.lengths.append(size + self.shared)
            self.used += size
        return True

    def counts(self, vocab_size: int) -> Tensor:
        """int64 [vocab_size]: how often the model wrote each token."""
        written = self.tokens[: self.used][self.roles[: self.used] != 0]
        return torch.bincount(written, minlength=vocab_size)

    def drop(self, excluded: set[str], decode) -> int:
        """Forgets conversations whose first user turn the model wrote and that is in `excluded` or
        was there before; how many."""
        tokens, roles = self.tokens.cpu().numpy(), self.roles.cpu().numpy()
        kept, seen = [], set(excluded)
        for index, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            turn = slice(start + 1, start + length - self.shared)
            if roles[turn.start] == USER:
                written = tokens[turn][roles[turn] == USER]
                key = prompt_key(decode(written.tolist()))
                if key in seen or len(key) < 8:
                    continue
                seen.add(key)
            kept.append(index)
        dropped = len(self.starts) - len(kept)
        self.starts = [self.starts[index] for index in kept]
        self.lengths = [self.lengths[index] for index in kept]
        return dropped

    def save(self, first: int, path: Path) -> None:
        """The conversations from `first` on: padded tokens int64, bool trained, int64 lengths."""
        rows = list(range(max(0, first), len(self.starts)))
        tokens, trained, _ = self.padded(rows)
        lengths = torch.tensor([self.lengths[row] for row in rows])
        tensors = {"tokens": tokens.cpu(), "trained": trained.cpu(), "lengths": lengths}
        save_file(tensors, path)

    def padded(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Conversations as int64 tokens, bool trained and hidden states, [n, longest] each."""
        device = self.hidden.device
        starts = torch.tensor([self.starts[index] for index in indices], device=device)[:, None]
        lengths = torch.tensor([self.lengths[index] for index in indices], device=device)[:, None]
        column = self.column[: max(self.lengths[index] for index in indices)]
        place = torch.where(column < self.shared, column, starts + column - self.shared)
        inside = column < lengths
        place = place * inside
        trained = (self.roles[place] != 0) & inside
        return self.tokens[place].long(), trained, self.hidden[place]
