"""SGLang's worker slots where a separate small model drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ascend.checkpoint.draft_model.vocabulary import num_tokens, tokenizer_file
from sglang_ascend.plugin.mtp.draft_worker import MTPDraftWorker
from sglang_ascend.plugin.mtp.worker import MTPWorker


class OwnHeadDraftWorker(MTPDraftWorker):
    """A causal language model with an embedding and a head of its own, on the target's slots.

    Slot i holds its keys and values of token i + 1, at position i; the first token is in none.
    """

    is_separate_model = True

    def init_token_map(self) -> None:
        """It has no list of tokens: its head drafts whatever is a token."""
        self.hot_token_id = self.vocabulary = None

    def init_lm_head(self) -> None:
        """Its own, of which rows behind the last token are padding."""
        model_config = self.draft_runner.model_config
        model = self.draft_runner.model
        known = num_tokens(tokenizer_file(Path(model_config.model_path)))
        model.logits_processor.vocab_size = min(known, model_config.vocab_size)
        if self.target_worker.model_config.vocab_size > model_config.vocab_size:
            read_as_last(model.model.embed_tokens, model_config.vocab_size)


class DraftModelWorker(MTPWorker):
    """``MTPWorker``, whose step does not ask what drafts."""

    draft_worker_cls = OwnHeadDraftWorker

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        """An update brings weights of the target alone."""
        return []


def read_as_last(embedding: torch.nn.Module, num_rows: int) -> None:
    """What ``embedding`` has no row for: of a target with more padding, which can be sampled. Any
    row does, for a wrong draft only costs speed."""

    def clamped(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *others = inputs
        return (tokens.clamp(max=num_rows - 1), *others)

    embedding.register_forward_pre_hook(clamped)
