"""transformers' own model in fp32 as the oracle of log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from launched_server import Logprobs, Reply
from transformers import DeepseekV3ForCausalLM, Qwen2ForCausalLM

# MiMo is Qwen2 with an MTP layer, which the oracle does not need.
CLASSES = {"qwen2": Qwen2ForCausalLM, "deepseek_v3": DeepseekV3ForCausalLM}
NUM_TOP = 16


@dataclass(frozen=True)
class ReferenceRows:
    """Row i says what follows token i: log-probability of token i+1 and the NUM_TOP likeliest."""

    next_token: torch.Tensor  # float [rows]
    top_values: torch.Tensor  # float [rows, NUM_TOP], descending
    top_tokens: torch.Tensor  # int64 [rows, NUM_TOP]

    def of_output(self, prompt_len: int) -> ReferenceRows:
        """The rows that predict what follows the prompt."""
        rows = slice(prompt_len - 1, None)
        return ReferenceRows(self.next_token[rows], self.top_values[rows], self.top_tokens[rows])


class ReferenceModel:
    """Eager attention, one sequence at a time, no cache, no padding."""

    def __init__(self, folder: Path) -> None:
        model_type = json.loads((folder / "config.json").read_text())["model_type"]
        self.model = CLASSES[model_type].from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval()
        self._rows: dict[tuple[int, ...], ReferenceRows] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], positions: Sequence[int] | None = None):
        """float32 [len(tokens), vocab_size]; positions default to 0, 1, 2, ..."""
        position_ids = None if positions is None else torch.tensor([positions])
        return self.model(torch.tensor([tokens]), position_ids=position_ids).logits[0]

    def logprobs(self, tokens: Sequence[int], positions: Sequence[int] | None = None):
        """As ``logits``, normalised."""
        return torch.log_softmax(self.logits(tokens, positions), dim=-1)

    def rows(self, tokens: Sequence[int], positions: Sequence[int] | None = None) -> ReferenceRows:
        """What follows each token but the last. Remembered, for servers answer alike."""
        key = tuple(tokens)
        if positions is None and key in self._rows:
            return self._rows[key]
        logprobs = self.logprobs(tokens[:-1], positions)
        top_values, top_tokens = logprobs.topk(NUM_TOP)
        next_token = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        rows = ReferenceRows(next_token, top_values, top_tokens)
        if positions is None:
            self._rows[key] = rows
        return rows

    def largest_difference(
        self, prompt: Sequence[int], reply: Reply, positions: Sequence[int] | None = None
    ) -> float:
        """Over every returned log-probability of the reply, prompt and output, chosen and top."""
        tokens = [*prompt, *reply.tokens]
        rows = self.rows(tokens, positions)
        first_prompt_row = len(prompt) - len(reply.prompt_logprobs.tokens)
        return max(
            _largest_difference(tokens, rows, first_prompt_row, reply.prompt_logprobs),
            _largest_difference(tokens, rows, len(prompt), reply.output_logprobs),
        )

    @contextmanager
    def one_weight_perturbed(self) -> Iterator[None]:
        """One projection of layer 1 is 2 % too large: the smallest kind of loading mistake."""
        weight = self.model.model.layers[1].self_attn.o_proj.weight
        remembered, self._rows = self._rows, {}
        with torch.no_grad():
            original = weight.clone()
            weight.mul_(1.02)
            try:
                yield
            finally:
                weight.copy_(original)
                self._rows = remembered


def _largest_difference(
    tokens: Sequence[int], rows: ReferenceRows, first: int, found: Logprobs
) -> float:
    """`found` are the predictions of tokens[first:]; infinite where a wrong token is in a top."""
    count = len(found.tokens)
    if list(found.tokens) != list(tokens[first : first + count]):
        return float("inf")
    worst = 0.0
    for i, (value, top) in enumerate(zip(found.values, found.top, strict=True)):
        row = first - 1 + i
        worst = max(worst, abs(value - float(rows.next_token[row])))
        expected = dict(
            zip(rows.top_tokens[row].tolist(), rows.top_values[row].tolist(), strict=True)
        )
        # By token, and by rank: neither a wrong value nor a missing likely token can hide.
        for token, logprob in top.items():
            worst = max(worst, abs(logprob - expected.get(token, float("inf"))))
        ranks = zip(sorted(top.values(), reverse=True), expected.values(), strict=False)
        worst = max([worst, *(abs(a - b) for a, b in ranks)])
    return worst
