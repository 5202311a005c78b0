"""SGLang's draft worker slot: the MTP layer beside the target, on its slots and positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from sglang_ascend.plugin.attention_backend import ChainDraftBackend
from sglang_ascend.speculative.vocabulary import read_draft_vocabulary


class MTPDraftWorker(EagleDraftWorker):
    """Loads and places the MTP layer as EAGLE does; attention views and vocabulary are ours."""

    def init_token_map(self) -> None:
        """The checkpoint's own draft vocabulary; the base class then slices the head by it."""
        model_config = self.draft_runner.model_config
        self.hot_token_id = read_draft_vocabulary(
            Path(model_config.model_path), model_config.vocab_size
        )

    def init_attention_backend(self) -> None:
        self.draft_extend_attn_backend = None
        self.draft_attn_backend = ChainDraftBackend(self.draft_runner, self.speculative_num_steps)
        self.draft_runner.draft_attn_backend = self.draft_attn_backend

    def draft(self, batch: ScheduleBatch, **kwargs: Any) -> None:
        raise RuntimeError("the MTP worker drafts inside speculative_step, not through draft().")

    def propose(self, logits: torch.Tensor) -> torch.Tensor:
        """Most likely token of each row, as an id of the target's vocabulary: int64 [rows]."""
        tokens = logits.argmax(dim=-1)
        return tokens if self.hot_token_id is None else self.hot_token_id[tokens]

    def _draft_extend_for_prefill(self, *args: Any, **kwargs: Any) -> EagleDraftInput:
        """As EAGLE's; its first draft token is relayed as an id of the target's vocabulary."""
        draft_input = super()._draft_extend_for_prefill(*args, **kwargs)
        if self.hot_token_id is not None:
            draft_input.topk_index = self.hot_token_id[draft_input.topk_index]
        return draft_input
