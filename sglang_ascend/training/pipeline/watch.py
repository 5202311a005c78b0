"""Acceptance at each position on held-out prompts, while the layer trains."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import torch

from sglang_ascend.bench.figures.lookup import accepted_counts
from sglang_ascend.training.acceptance import Output, conditional, draft_matches
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
        counts: list[int] = []
        for output in self.outputs:
            matches = draft_matches(self.layer, output, embedding, head, self.num_steps)
            counts += accepted_counts(matches, output.prompt_length)
        return [round(share, 4) for share in conditional(counts, self.num_steps)]
