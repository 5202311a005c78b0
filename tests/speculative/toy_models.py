"""A toy language model and a toy MTP layer with real state in slots, as ``Forwards`` of a batch.

Both read their slots back at every forward and fail on one that does not hold what it must.
"""

import torch

from sglang_ascend.ops import chain
from sglang_ascend.speculative.step import DraftSeed

VOCABULARY = 11
NUM_STATES = 9973
PROMPT_LENGTHS = [3, 1, 9, 4, 2, 6, 5]
MAX_CONTEXT_LEN = 80


def fold(state: int, token: int) -> int:
    """The model's state after one more token; never 0, which is the state before the first."""
    return (state * 31 + token * 7 + 3) % NUM_STATES + 1


def next_token(state: int) -> int:
    return (state * state // 7) % VOCABULARY


def states_of(tokens: list[int]) -> list[int]:
    states, state = [], 0
    for token in tokens:
        state = fold(state, token)
        states.append(state)
    return states


def decode_greedily(prompt: list[int], num_tokens: int) -> list[int]:
    """Plain decoding, from scratch for every token: the oracle of everything below."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(states_of(tokens)[-1]))
    return tokens


def perfect(state: int) -> int:
    return next_token(state)


def adversarial(state: int) -> int:
    """Always wrong."""
    return (next_token(state) + 1) % VOCABULARY


def mixed(state: int) -> int:
    """Right two times in three, in no order."""
    return (next_token(state) + (state % 3 == 0)) % VOCABULARY


def constant(state: int) -> int:
    """Right now and then, and for reasons of its own."""
    return 4


DRAFTS = [perfect, adversarial, mixed, constant]


def one_hot(tokens: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def make_prompts(batch_size: int) -> list[list[int]]:
    return [
        [(5 * request + 3 * position + 1) % VOCABULARY for position in range(length)]
        for request, length in enumerate(PROMPT_LENGTHS[:batch_size])
    ]


class ToyModels:
    """``Forwards`` of a batch: two caches behind one slot table, as in SGLang.

    The target's slot holds its token; a hidden state is the fold of all tokens up to it. The MTP
    slot of position p holds (hidden state p, token p + 1) and its output is the state at p + 1.
    """

    def __init__(self, prompts: list[list[int]], num_steps: int, predict) -> None:
        self.num_steps, self.predict = num_steps, predict
        batch_size = len(prompts)
        generator = torch.Generator().manual_seed(batch_size)
        slots = torch.randperm(2 * batch_size * MAX_CONTEXT_LEN, generator=generator)
        self.req_to_token = slots.view(2 * batch_size, MAX_CONTEXT_LEN)
        self.rows = torch.randperm(2 * batch_size, generator=generator)[:batch_size]
        self.target_cache: dict[int, int] = {}
        self.mtp_cache: dict[int, tuple[int, int]] = {}
        # Tokens whose target state is final, per request; the bonus token comes after them.
        self.committed = [list(prompt) for prompt in prompts]
        self.calls: list[str] = []
        self.published: torch.Tensor | None = None
        self.seed = self._prefill()

    def _prefill(self) -> DraftSeed:
        bonus, first, hidden = [], [], []
        for request, tokens in enumerate(self.committed):
            states = states_of(tokens)
            bonus.append(next_token(states[-1]))
            following = [*tokens[1:], bonus[-1]]
            for position, token in enumerate(tokens):
                slot = self.slot(request, position)
                self.target_cache[slot] = token
                self.mtp_cache[slot] = (states[position], following[position])
            hidden.append(fold(states[-1], bonus[-1]))
            first.append(self.predict(hidden[-1]))
        return DraftSeed(
            bonus_tokens=torch.tensor(bonus, dtype=torch.int32),
            first_tokens=torch.tensor(first),
            hidden_states=torch.tensor(hidden, dtype=torch.float64)[:, None],
        )

    def slot(self, request: int, position: int) -> int:
        return int(self.req_to_token[self.rows[request], position])

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor([len(tokens) for tokens in self.committed])

    def begin_step(self) -> None:
        self.calls.clear()
        self.target_written: set[int] = set()
        self.mtp_written: set[int] = set()
        self.window = chain.window_slots(
            self.seq_lens, self.rows, self.req_to_token, self.num_steps + 1
        ).view(-1, self.num_steps + 1)

    def run_mtp(self, request: int, position: int, slot: int, state: int, token: int) -> int:
        """Writes one slot, then reads every slot up to it: the toy's attention."""
        self.mtp_cache[slot] = (state, token)
        self.mtp_written.add(slot)
        tokens = self.committed[request]
        states = states_of(tokens)
        for seen in range(min(position, len(tokens) - 1)):
            pair = self.mtp_cache[self.slot(request, seen)]
            assert pair == (states[seen], tokens[seen + 1]), "a committed MTP slot went stale"
        for seen in range(len(tokens), position):
            earlier_state, earlier_token = self.mtp_cache[self.slot(request, seen)]
            later_state, _ = self.mtp_cache[self.slot(request, seen + 1)]
            assert fold(earlier_state, earlier_token) == later_state, "the chain is broken"
        return fold(state, token)

    def draft(self, step: int, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple:
        self.calls.append("draft")
        states = [
            self.run_mtp(
                request,
                len(self.committed[request]) + step,
                int(self.window[request, step]),
                int(hidden[request, 0]),
                int(token),
            )
            for request, token in enumerate(tokens)
        ]
        return self.mtp_output(states)

    def verify(self, candidates: torch.Tensor) -> tuple:
        self.calls.append("verify")
        states = []
        for request, tokens in enumerate(candidates.tolist()):
            for offset, token in enumerate(tokens):
                slot = int(self.window[request, offset])
                self.target_cache[slot] = token
                self.target_written.add(slot)
            length = len(self.committed[request])
            seen = [
                self.target_cache[self.slot(request, position)]
                for position in range(length + len(tokens))
            ]
            states += states_of(seen)[length:]
        logits = one_hot([next_token(state) for state in states])
        return logits, torch.tensor(states, dtype=torch.float64)[:, None]

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        self.calls.append("sample")
        return logits.argmax(dim=-1).view(-1, self.num_steps + 1).to(torch.int32)

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        self.calls.append("publish")
        self.published = new_seq_lens

    def extend(self, tokens: torch.Tensor, hidden: torch.Tensor, last_rows: torch.Tensor) -> tuple:
        self.calls.append("extend")
        width = self.num_steps + 1
        states = []
        for request, row in enumerate(tokens.tolist()):
            for offset, token in enumerate(row):
                state = int(hidden[request * width + offset, 0])
                slot = int(self.window[request, offset])
                self.mtp_cache[slot] = (state, token)
                self.mtp_written.add(slot)
                states.append(fold(state, token))
        return self.mtp_output([states[row] for row in last_rows.tolist()])

    def mtp_output(self, states: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor([self.predict(state) for state in states])
        return tokens, torch.tensor(states, dtype=torch.float64)[:, None]
