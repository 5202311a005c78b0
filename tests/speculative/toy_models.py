"""A toy language model and a toy MTP layer with real state in slots, as ``Forwards`` of a batch,
and greedy ``Sampling``.

Both read their slots back at every forward and fail on one that does not hold what it must.
"""

import torch

from sglang_ascend.speculative.forwards import Requests, Rows
from sglang_ascend.speculative.step import LaunchedPhases, StepConstants

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
        # Row 0 is nobody's: a captured step's rows of no request stand there.
        self.rows = 1 + torch.randperm(2 * batch_size - 1, generator=generator)[:batch_size]
        self.nobodys = set(self.req_to_token[0].tolist())
        self.constants = StepConstants(num_steps, max(batch_size, len(PROMPT_LENGTHS)), "cpu")
        self.target_cache: dict[int, int] = {}
        self.mtp_cache: dict[int, tuple[int, int]] = {}
        # Tokens whose target state is final, per request; the bonus token comes after them.
        self.committed = [list(prompt) for prompt in prompts]
        self.calls: list[str] = []
        self.target_written: set[int] = set()
        self.mtp_written: set[int] = set()
        self.published: torch.Tensor | None = None
        self.candidates = self._prefill()

    def _prefill(self) -> torch.Tensor:
        """Caches of the prompts, and [bonus, draft 1, ..., draft K] of each request."""
        rows = []
        for request, tokens in enumerate(self.committed):
            states = states_of(tokens)
            bonus = next_token(states[-1])
            following = [*tokens[1:], bonus]
            for position, token in enumerate(tokens):
                slot = self.slot(request, position)
                self.target_cache[slot] = token
                self.mtp_cache[slot] = (states[position], following[position])
            rows.append([bonus, *self.chain_after(fold(states[-1], bonus))])
        return torch.tensor(rows)

    def chain_after(self, state: int) -> list[int]:
        """What the MTP layer drafts from a state, applied to its own output K times."""
        drafted = []
        for _ in range(self.num_steps):
            drafted.append(self.predict(state))
            state = fold(state, drafted[-1])
        return drafted

    def slot(self, request: int, position: int) -> int:
        return int(self.req_to_token[self.rows[request], position])

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor([len(tokens) for tokens in self.committed])

    def begin_step(self) -> Requests:
        self.calls.clear()
        self.target_written.clear()
        self.mtp_written.clear()
        max_kv_len = int(self.seq_lens.max()) + 2 * self.num_steps
        return Requests(self.seq_lens, self.rows, self.req_to_token, max_kv_len)

    def run_mtp(self, slots: list[int], slot: int, state: int, token: int) -> int:
        """Writes one slot, then reads those before it, newest first: the toy's attention."""
        self.mtp_cache[slot] = (state, token)
        self.mtp_written.add(slot)
        later_state = state
        for seen in reversed(slots if slot not in self.nobodys else ()):
            earlier_state, earlier_token = self.mtp_cache[seen]
            assert fold(earlier_state, earlier_token) == later_state, "the chain is broken"
            later_state = earlier_state
        return fold(state, token)

    def phases(self) -> LaunchedPhases:
        return LaunchedPhases(self, self.propose, self.constants)

    def target(self, rows: Rows, tokens: torch.Tensor, requests: Requests) -> tuple:
        self.calls.append("target")
        width = len(rows.slots) // len(requests.seq_lens)
        states = []
        for request in range(len(requests.seq_lens)):
            of_request = slice(request * width, (request + 1) * width)
            written = rows.slots[of_request].tolist()
            for slot, token in zip(written, tokens[of_request].tolist(), strict=True):
                self.target_cache[slot] = token
                self.target_written.add(slot)
            kv_len = int(rows.metadata.kv_lens[request])
            slots = rows.metadata.block_table[request, :kv_len].tolist()
            seen = states_of([self.target_cache[slot] for slot in slots])
            states += [seen[position] for position in rows.positions[of_request].tolist()]
        logits = one_hot([next_token(state) for state in states])
        return logits, torch.tensor(states, dtype=torch.float64)[:, None]

    def publish(self, new_seq_lens: torch.Tensor) -> None:
        self.calls.append("publish")
        self.published = new_seq_lens
        # What the scheduler may do from here on: rows and lengths are its own again.
        self.req_to_token_before = self.req_to_token.clone()
        self.req_to_token.fill_(-1)

    def end_step(self) -> None:
        self.req_to_token.copy_(self.req_to_token_before)

    def mtp(self, rows: Rows, tokens: torch.Tensor, hidden: torch.Tensor, last_rows=None) -> tuple:
        if last_rows is None:
            return self.draft_from_itself(rows, tokens, hidden)
        self.calls.append("extend")
        states = []
        for row, token in enumerate(tokens.tolist()):
            state, slot = int(hidden[row, 0]), int(rows.slots[row])
            self.mtp_cache[slot] = (state, token)
            self.mtp_written.add(slot)
            states.append(fold(state, token))
        return self.mtp_output([states[row] for row in last_rows.tolist()])

    def draft_from_itself(self, rows: Rows, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple:
        self.calls.append("decode")
        states = []
        for request, token in enumerate(tokens.tolist()):
            position, kv_len = int(rows.positions[request]), int(rows.metadata.kv_lens[request])
            assert position == kv_len - 1
            slots = rows.metadata.block_table[request, :kv_len].tolist()
            assert slots[-1] == int(rows.slots[request])
            state = int(hidden[request, 0])
            states.append(self.run_mtp(slots[:-1], slots[-1], state, token))
        return self.mtp_output(states)

    def mtp_output(self, states: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = one_hot([self.predict(state) for state in states])
        return logits, torch.tensor(states, dtype=torch.float64)[:, None]

    def propose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)


class GreedySampling:
    """``Sampling`` of requests that all take the likeliest token."""

    draft_probs = None
    lossy_rule = None

    def __init__(self) -> None:
        self.committed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read_chain(self, candidates: torch.Tensor) -> None:
        self.width = candidates.shape[1]

    def adjust(self, logits: torch.Tensor, candidates: torch.Tensor) -> None:
        pass

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1).view(-1, self.width)

    def commit(self, candidates: torch.Tensor, sampled: torch.Tensor, accept_lens: torch.Tensor):
        self.committed.append((candidates, accept_lens))
        return sampled, accept_lens
