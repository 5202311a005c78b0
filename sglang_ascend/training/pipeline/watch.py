"""Acceptance at each position on held-out prompts, while the layer trains."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import torch

from sglang_ascend.bench.figures.lookup import accepted_counts
from sglang_ascend.training.acceptance import Output, draft_matches
from sglang_ascend.training.interface import ChainLayer
from sglang_ascend.training.trainer import Trainer

FILE_NAME = "acceptance.jsonl"
MAX_OUTPUTS = 12  # watched ones: a look takes seconds


@dataclass
class Watch:
    """Looks at the averaged weights each `every` steps and writes one line for each look."""

    layer: torch.nn.Module  # implements ``interface.ChainLayer``
    outputs: list[Output]
    num_steps: int
    every: int

    def __post_init__(self) -> None:
        self.layer = copy.deepcopy(self.layer)
        stride = -(-len(self.outputs) // MAX_OUTPUTS)
        self.outputs = self.outputs[::stride]
        self.latest, self.said = -1, ""

    def __call__(self, trainer: Trainer) -> str:
        """What to show beside the loss; see `Trainer.run`."""
        is_last = trainer.step == trainer.config.max_steps
        if trainer.step // self.every == self.latest and not is_last:
            return self.said
        self.latest = trainer.step // self.every
        shares = self.look(trainer)
        line = {"step": trainer.step, "accepted": shares}
        with (trainer.out / FILE_NAME).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        self.said = "accepted " + " ".join(f"{share:.2f}" for share in shares)
        return self.said

    def look(self, trainer: Trainer) -> list[float]:
        """The share of the draft at each position that is accepted where those before it were."""
        self.layer.load_state_dict(trainer.layer.state_dict() | trainer.average)
        # Whatever it trains in.
        embedding, head = trainer.embedding.float(), trainer.draft_head.float()
        return accepted_shares(self.layer, self.outputs, embedding, head, self.num_steps)


def accepted_shares(
    layer: ChainLayer,
    outputs: list[Output],
    embedding: torch.Tensor,
    head: torch.Tensor,
    num_steps: int,
) -> list[float]:
    """P(draft k is accepted | those before it were), k from 1, greedy."""
    counts: list[int] = []
    for output in outputs:
        matches = draft_matches(layer, output, embedding, head, num_steps)
        counts += accepted_counts(matches, output.prompt_length)
    reached = [sum(count >= step for count in counts) for step in range(num_steps + 1)]
    return [round(reached[k + 1] / max(1, reached[k]), 4) for k in range(num_steps)]
