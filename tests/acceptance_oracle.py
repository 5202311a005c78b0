"""Whether each step of a served reply accepted as many drafts as the MTP layer's definition gives,
or a search of the tokens so far, where its chain was looked up.

The target is transformers' own model and the MTP layer the one that training defines, whose
recursion tests/training compares with chains drafted one by one. Nothing is shared with serving.
The reply is teacher-forced: a chain is cut at its first wrong draft, so every draft that counts was
drafted behind tokens of the reply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from greedy_oracle import CLASSES
from lookup_oracle import searched
from torch import Tensor

from sglang_ascend.speculative.lookup.drafts import MAX_MATCH, MIN_MATCH
from sglang_ascend.speculative.vocabulary.context import MOST_UNLISTED
from sglang_ascend.speculative.vocabulary.file import read_draft_vocabulary
from sglang_ascend.training.interface import run_chain
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import own_layer

# Of two logits in fp32: of tokens that are closer, a server may draft either. Served and offline
# log-probabilities may differ by 2e-4 (tests/serving/test_features.py).
TIE = 4e-4


@dataclass(frozen=True)
class Step:
    """One verification of one request."""

    start: int  # tokens of the request in the cache before it
    accepted: int  # drafts
    # Where not every step has as many: the drafts of its chain, and how long it was verified, its
    # last token repeated.
    drafted: int | None = None
    verified: int | None = None
    is_lookup: bool = False  # or else the MTP layer drafted

    @property
    def end(self) -> int:
        return self.start + self.accepted + 1


@dataclass(frozen=True)
class Judgement:
    """Of the steps of some replies."""

    num_steps: int = 0
    num_first: int = 0  # steps of a chain that a prefill began
    num_ties: int = 0  # equal only because two tokens are as likely
    wrong: tuple[tuple[Step, int], ...] = ()  # a step and what it should have accepted
    accepted: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of_all(cls, judged: Iterable[Judgement]) -> Judgement:
        found = list(judged)
        return cls(
            sum(one.num_steps for one in found),
            sum(one.num_first for one in found),
            sum(one.num_ties for one in found),
            tuple(wrong for one in found for wrong in one.wrong),
            sum((one.accepted for one in found), Counter()),
        )

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps ({self.num_first} behind a prefill), {self.num_ties} in a "
            f"tie, {len(self.wrong)} wrong; accepted {dict(sorted(self.accepted.items()))}"
        )


class AcceptanceOracle:
    """Of a checkpoint whose server drafts `num_steps` tokens: of the draft vocabulary and of each
    request's own text, which two servers leave out, unless its head is split between ranks."""

    # Drafts of a chain behind a prefill on another server; None: as many as of any other.
    drafted_behind_transfer: int | None = None

    def __init__(self, folder: Path, num_steps: int = 3, cuts_vocabulary: bool = True) -> None:
        target = Target.open(folder)
        self.num_steps = num_steps
        model_class = CLASSES[target.config.fields["model_type"]]
        self.model = model_class.from_pretrained(folder, dtype=torch.float32).eval().model
        self.layer = own_layer(target).eval()
        self.embedding, self.head = target.embedding_and_head()
        drafted = read_draft_vocabulary(folder, len(self.head)) if cuts_vocabulary else None
        self.drafted = None if drafted is None else set(drafted.tolist())
        self.reads_own_text = True

    def judge(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        steps: Sequence[Step],
        num_retractions: int = 0,
    ) -> Judgement:
        """`steps` are all those of the reply, in order; its request was retracted so often."""
        tokens = [*prompt, *output]
        first = firsts_of(prompt, tokens, steps, num_retractions)
        lead, behind = self._distances(tokens, steps, first)
        judged = [
            _judge_lookup(step, tokens) if step.is_lookup else _judge_step(step, *rows)
            for step, *rows in zip(steps, lead.tolist(), behind.tolist(), strict=True)
        ]
        return Judgement(
            len(steps),
            sum(first),
            sum(is_right and is_tie for is_right, is_tie, _ in judged),
            tuple(
                (step, expected)
                for step, (is_right, _, expected) in zip(steps, judged, strict=True)
                if not is_right
            ),
            Counter(step.accepted for step in steps),
        )

    @torch.inference_mode()
    def _distances(
        self, tokens: list[int], steps: Sequence[Step], first: list[bool]
    ) -> tuple[Tensor, Tensor]:
        """Of each draft of each step, [steps, K]: how far the likeliest draft's logit lies above
        the next one's, and above that of the reply's token. NaN where the reply has ended."""
        chain = self._chain(torch.tensor([tokens]))
        # The chain behind token `start` is drafted from the hidden state of the token before it.
        slots = torch.tensor([step.start for step in steps]) - 1
        wanted = slots[:, None] + 2 + torch.arange(self.num_steps)
        is_known = wanted < len(tokens)
        wanted = torch.tensor(tokens)[wanted.clamp(max=len(tokens) - 1)]
        logits = torch.stack([states[0, slots] @ self.head.T for states in chain], dim=1)
        for of_step, step in zip(logits, steps, strict=True):
            of_step[:, ~self._can_be_drafted(tokens[: step.start + 1])] = -torch.inf
        top = logits.topk(2, dim=-1).values
        behind = top[..., 0] - logits.gather(2, wanted[..., None])[..., 0]
        lead = top[..., 0] - top[..., 1]
        # A chain repeats its last token where it has fewer.
        places, drafted = torch.arange(self.num_steps), self._drafted(steps, first)
        last = torch.tensor(tokens)[(slots + 1 + drafted).clamp(max=len(tokens) - 1)]
        repeats = places >= drafted[:, None]
        same = wanted == last[:, None]
        behind = torch.where(repeats, torch.where(same, 0.0, torch.inf), behind)
        lead = torch.where(repeats, torch.inf, lead)
        verified = [self.num_steps if step.verified is None else step.verified for step in steps]
        is_known &= places < torch.tensor(verified)[:, None]
        return lead.masked_fill(~is_known, torch.nan), behind.masked_fill(~is_known, torch.nan)

    def _chain(self, tokens: Tensor) -> list[Tensor]:
        """Of each draft, what the head reads of every slot, [1, slots, hidden_size]; `tokens` int64
        [1, length]."""
        hidden = self.model(tokens).last_hidden_state
        return run_chain(self.layer, hidden, tokens, self.embedding, self.num_steps)

    def _can_be_drafted(self, known: Sequence[int]) -> Tensor:
        """bool [vocab_size], of a request that has these tokens."""
        if self.drafted is None:
            return torch.ones(len(self.head), dtype=torch.bool)
        own = known if self.reads_own_text else ()
        unlisted = [token for token in own if token not in self.drafted]
        allowed = torch.zeros(len(self.head), dtype=torch.bool)
        allowed[[*self.drafted, *unlisted[-MOST_UNLISTED:]]] = True
        return allowed

    def _drafted(self, steps: Sequence[Step], first: list[bool]) -> Tensor:
        """Drafts of each step's chain, before its last token is repeated."""
        begun = self.drafted_behind_transfer or self.num_steps
        usual = [begun if is_first else self.num_steps for is_first in first]
        told = [step.drafted for step in steps]
        pairs = zip(told, usual, strict=True)
        return torch.tensor([other if number is None else number for number, other in pairs])


def firsts_of(
    prompt: Sequence[int], tokens: list[int], steps: Sequence[Step], num_retractions: int
) -> list[bool]:
    """Which steps follow a prefill: of the prompt, or of all tokens after a retraction, which gives
    one token more, whether a step comes before the next one or not. Together they must have given
    the whole reply."""
    retracted_at_once = steps[0].start - len(prompt)
    gaps = [after.start - before.end for before, after in pairwise(steps)]
    assert min([retracted_at_once, *gaps]) >= 0, (len(prompt), steps)
    assert sum([retracted_at_once, *gaps]) <= num_retractions, (len(prompt), steps)
    assert steps[-1].start < len(tokens) <= steps[-1].end + 1, (len(tokens), steps)
    return [True, *(gap > 0 for gap in gaps)]


def _judge_lookup(step: Step, tokens: list[int]) -> tuple[bool, bool, int]:
    """As ``_judge_step``; there are no ties."""
    assert step.drafted and step.verified
    known, following = tokens[: step.start + 1], tokens[step.start + 1 :][: step.verified]
    chain, _ = searched(known, step.drafted, MIN_MATCH, MAX_MATCH)
    chain += chain[-1:] * (step.verified - step.drafted)
    expected = next((i for i, token in enumerate(following) if token != chain[i]), len(following))
    return min(step.accepted, len(following)) == expected, False, expected


def _judge_step(step: Step, lead: list[float], behind: list[float]) -> tuple[bool, bool, int]:
    """(the served count is right, and only because of a tie, the offline count)."""
    num_known = sum(value == value for value in behind)
    expected = next((i for i, value in enumerate(behind[:num_known]) if value > 0), num_known)
    served = min(step.accepted, num_known)
    could_accept = all(value <= TIE for value in behind[:served])
    could_reject = served == num_known or behind[served] > 0 or lead[served] <= TIE
    return could_accept and could_reject, served != expected, expected
