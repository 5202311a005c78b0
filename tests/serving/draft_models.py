"""A target and a small model that drafts for it, made here, and what each step should accept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from acceptance_oracle import TIE, AcceptanceOracle
from launched_server import ServerConfig
from safetensors.torch import load_file, save_file
from tiny_targets import WORDS, write_target
from torch import Tensor
from transformers import AutoModelForCausalLM

# Rows of embedding and head, of which only the first are tokens.
TARGET_ROWS, DRAFT_ROWS = 24, 16
# Of the draft's weights, beside the target's: some of its drafts are right and some are wrong.
NOISE = 0.1


def write_target_and_draft(folder: Path) -> tuple[Path, Path]:
    """A Llama, and the same with noise on every weight. Each has padding in embedding and head; the
    draft's is what its head likes best, and the target's is drawn now and then."""
    target, draft = (
        write_target(folder / name, "LlamaForCausalLM", vocab_size=rows)
        for name, rows in (("target", TARGET_ROWS), ("draft", DRAFT_ROWS))
    )
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    drafting = {}
    for name, weight in weights.items():
        noise = NOISE * weight.float().std() * torch.randn(weight.shape, generator=generator)
        drafting[name] = (weight + noise).to(weight.dtype)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        drafting[name] = drafting[name][:DRAFT_ROWS].clone()
    drafting["lm_head.weight"][len(WORDS) :] *= 10
    save_file(drafting, draft / "model.safetensors", metadata={"format": "pt"})
    weights["lm_head.weight"][len(WORDS) :] *= 0.1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target, draft


def with_draft_model(plain: ServerConfig, draft: Path) -> ServerConfig:
    """The server `plain` with `draft` before it; its other flags stay."""
    asked = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft))
    return ServerConfig(
        plain.model_path,
        mtp=False,
        dtype=plain.dtype,
        page_size=plain.page_size,
        flags=(*plain.flags, *asked),
        variables=plain.variables,
    )


class Greedy:
    """Whether tokens are those that transformers' own target likes best, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def says(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        logits = self.model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return bool((logits.amax(-1) - chosen <= TIE).all())


class DraftModelAcceptance(AcceptanceOracle):
    """As its base, of drafts by transformers' own model, which is told all tokens but the first:
    SGLang gives slot i of a draft token i + 1."""

    def __init__(self, draft: Path, num_steps: int = 3) -> None:
        model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
        head = model.lm_head.weight
        self.num_steps, self.model, self.num_rows = num_steps, model.model, len(head)
        # As many rows as the target's, none of which is drafted.
        self.head = F.pad(head, (0, 0, 0, TARGET_ROWS - self.num_rows))
        self.drafted, self.reads_own_text = set(range(len(WORDS))), False

    def _chain(self, tokens: Tensor) -> list[Tensor]:
        """Draft k + 1 of slot i is what follows token i + k + 1. What it has no row for, it reads
        as its last one."""
        hidden = self.model(tokens[:, 1:].clamp(max=self.num_rows - 1)).last_hidden_state
        return [F.pad(hidden[:, k:], (0, 0, 0, k)) for k in range(self.num_steps)]
