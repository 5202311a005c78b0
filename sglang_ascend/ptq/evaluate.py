"""What quantization cost: distributions, tokens and drafts of a checkpoint beside its float one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.text import Text
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.training.acceptance import Output, draft_matches
from sglang_ascend.training.targets.families import Target


@dataclass(frozen=True)
class Score:
    """Sums over the positions of one text, float64.

    A position behind the same tokens as one of an earlier text is left out, as in a system prompt
    that all begin with: it is the same sample.

    Attributes:
        kl: KL(reference || this) of the next token, nats.
        reply_kl, reply_positions: the same where the next token is of the reply, so that serving
            draws from it.
        surprise: -log p of the text's own next token, nats.
        agreed: positions where both rank the same token first.
        positions: how many predict a token of the text.
        accepted: [K + 1]: slots whose first k drafts are all kept, for k of 0..K.
    """

    domain: str
    kl: float
    surprise: float
    agreed: int
    positions: int
    reply_kl: float
    reply_positions: int
    accepted: list[int]


@dataclass(frozen=True)
class Evaluated:
    """One checkpoint: a score of every text, its weights' bytes, and how fast it was computed."""

    folder: Path
    scores: list[Score]
    num_bytes: int
    tokens_per_second: float


def evaluate(
    folders: list[Path],
    against: Path,
    texts: list[Text],
    num_steps: int = 3,
    progress: Callable[[str], object] = lambda name: None,
) -> list[Evaluated]:
    """Scores `against` (first in the result) and every folder on the same texts, teacher-forced.

    One layer of one checkpoint is in memory at a time, beside embedding and head; quantized linears
    compute by the operators that serving runs, everything else in float32.

    Raises:
        CheckpointError: a checkpoint is refused, or its vocabulary is another.
    """
    judge = Judge(against, texts, num_steps)
    result = [judge.reference]
    progress(str(against))
    for folder in folders:
        result.append(judge.score(folder, Weights(folder)))
        progress(str(folder))
    return result


class Judge:
    """Scores models beside the checkpoint `against`, whose hidden states of `texts` are kept."""

    @torch.inference_mode()
    def __init__(self, against: Path, texts: list[Text], num_steps: int = 3) -> None:
        self._texts, self._num_steps = texts, num_steps
        self._float = _Model(against, Weights(against))
        self._is_new = first_seen(texts)
        self._wanted, seconds = self._hidden(self._float)
        self.reference = self._evaluated(self._float, self._wanted, seconds)

    @torch.inference_mode()
    def score(self, folder: Path, weights: Weights) -> Evaluated:
        """Of `weights`, which go by the name of `folder`.

        Raises:
            CheckpointError: they are refused, or their vocabulary is another.
        """
        model, reference = _Model(folder, weights), self._float
        if model.vocabulary != reference.vocabulary:
            raise CheckpointError(
                f"{shown(folder)} has a vocabulary of {model.vocabulary} and "
                f"{shown(reference.folder)} one of {reference.vocabulary}; pass the checkpoint "
                "that it was made from"
            )
        return self._evaluated(model, *self._hidden(model))

    def _hidden(self, model: _Model) -> tuple[list[Tensor], float]:
        """[length, size] of each text behind the last norm, and how many seconds that took."""
        started = time.perf_counter()
        hidden = model.layers.final_hidden([text.tokens for text in self._texts])
        return hidden, time.perf_counter() - started

    def _evaluated(self, model: _Model, hidden: list[Tensor], seconds: float) -> Evaluated:
        accepted = _accepted(model, hidden, self._texts, self._num_steps)
        rows = zip(self._texts, self._is_new, hidden, self._wanted, accepted, strict=True)
        scores = [_score(model, self._float, *row) for row in rows]
        tokens = sum(len(text.tokens) for text in self._texts)
        return Evaluated(model.folder, scores, model.weights.num_bytes, tokens / seconds)


class _Model:
    def __init__(self, folder: Path, weights: Weights) -> None:
        self.folder, self.weights = folder, weights
        self.target = Target.open(weights.checkpoint.folder, may_be_quantized=True)
        self.layers = Layers(self.target, self.weights)
        self.embedding = self.layers.embedding()
        self.head = self.layers.head()
        self.logits = self.layers.logits(self.head)
        self.vocabulary = len(self.embedding)


def first_seen(texts: Sequence[Text]) -> list[Tensor]:
    """bool [n - 1] of each text: no earlier one has the same tokens up to that position."""
    found: list[Tensor] = []
    nodes: dict[tuple[int, int], int] = {}  # of all texts' tree of tokens, by node above and token
    for text in texts:
        above, is_new = 0, []
        for token in text.tokens[:-1].tolist():
            is_new.append((above, token) not in nodes)
            above = nodes.setdefault((above, token), len(nodes) + 1)
        found.append(torch.tensor(is_new, dtype=torch.bool))
    return found


def _score(
    model: _Model,
    reference: _Model,
    text: Text,
    is_new: Tensor,
    own: Tensor,
    other: Tensor,
    accepted: list[int],
) -> Score:
    """Of one text, from the hidden states that the model and the reference make of it."""
    expected = F.log_softmax(reference.logits(other[:-1][is_new]).double(), -1)
    found = F.log_softmax(model.logits(own[:-1][is_new]).double(), -1)
    following = text.tokens[1:, None][is_new]
    divergence = (expected.exp() * (expected - found)).sum(-1)
    of_reply = divergence[is_new[: text.prompt_length - 1].sum() :]
    return Score(
        domain=text.domain,
        kl=float(divergence.sum()),
        surprise=float(-found.gather(1, following).sum()),
        agreed=int((expected.argmax(-1) == found.argmax(-1)).sum()),
        positions=len(following),
        reply_kl=float(of_reply.sum()),
        reply_positions=len(of_reply),
        accepted=accepted,
    )


def _accepted(
    model: _Model, hidden: list[Tensor], texts: list[Text], num_steps: int
) -> list[list[int]]:
    """For each text, how many slots keep at least 0..K drafts of a chain.

    A slot counts when the next K + 1 tokens of the reply are the model's own first choices: there,
    and only there, teacher forcing shows the very chain that serving would verify.
    """
    prefix = model.target.mtp_prefix
    if not any(name.startswith(prefix) for name in model.target.tensors):
        return [[0] * (num_steps + 1) for _ in texts]
    layer = model.layers.mtp()
    found = []
    for text, states in zip(texts, hidden, strict=True):
        output = Output(text.domain, text.tokens, text.prompt_length, states)
        table = draft_matches(layer, output, model.embedding, model.head, num_steps)
        matches = torch.tensor(table)
        own = model.logits(states[:-1]).argmax(-1) == text.tokens[1:]  # [n - 1]
        chains = own.unfold(0, num_steps + 1, 1).all(1)  # slot i: tokens i + 1..i + 1 + K
        slots = torch.arange(len(chains)) >= text.prompt_length - 1
        kept = matches[: len(chains)][chains & slots].cumprod(1)
        found.append([len(kept), *kept.sum(0).tolist()])
    return found
