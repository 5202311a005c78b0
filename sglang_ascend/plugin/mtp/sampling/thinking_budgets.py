"""Thinking budgets of SGLang's requests, kept on every verified row.

A request asks for one by ``custom_logit_processor``, a class of SGLang's own, pickled, and
``custom_params``. SGLang calls the class on rows that follow what the host knows of a reply. Here
the class gives its tokens alone.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_ascend.plugin.mtp.sampling.served_budgets import Model, budget_model
from sglang_ascend.plugin.requests.pool_state import PoolState
from sglang_ascend.sampling.thinking import Budgets, Delimiters, ThinkingSections

NONE = 2**31  # tokens that no reply has


def asks_budgets(batch: ScheduleBatch) -> bool:
    return batch.sampling_info.has_custom_logit_processor


class RequestBudgets(PoolState):
    """The budgets of a server's requests, and how much of them is used up.

    Callers ask it about batches of which ``asks_budgets`` is true, and about no others.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self._sections = ThinkingSections(num_rows, device)
        self._of_last_batch: tuple[list[Req], Budgets] | None = None

    def restart(self, reqs: list[Req], rows: torch.Tensor) -> None:
        asked = [i for i, req in enumerate(reqs) if req.custom_logit_processor]
        models = [_model_of(reqs[i]) for i in asked]
        delimiters = [
            Delimiters(model.THINKING_START_TOKEN_ID, model.THINKING_END_TOKEN_ID)
            for model in models
        ]
        known = [[*reqs[i].origin_input_ids, *reqs[i].output_ids] for i in asked]
        self._sections.restart(rows[asked], delimiters, known)

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        self._sections.commit(rows, self._sections.along(rows, tokens), num_kept)

    def apply(self, batch: ScheduleBatch, logits: torch.Tensor, candidates: torch.Tensor) -> None:
        """On the rows that verify ``candidates`` int64 [batch, K+1]: logits [batch, K+1,
        vocab_size], in place."""
        along = self._sections.along(batch.req_pool_indices, candidates)
        self._of(batch).apply(logits, along, candidates)

    def _of(self, batch: ScheduleBatch) -> Budgets:
        """Made again only when the batch changes."""
        if self._of_last_batch is None or self._of_last_batch[0] != batch.reqs:
            self._of_last_batch = list(batch.reqs), _budgets_of(batch.reqs, batch.device)
        return self._of_last_batch[1]


def _budgets_of(reqs: list[Req], device: torch.device | str) -> Budgets:
    rows = [
        (
            _asked_of(req.sampling_params.custom_params),
            _model_of(req).NEW_LINE_TOKEN_ID,
            _model_of(req).THINKING_END_TOKEN_ID,
        )
        if req.custom_logit_processor
        else (NONE, 0, 0)
        for req in reqs
    ]
    return Budgets(*torch.tensor(rows).to(device, non_blocking=True).unbind(1))


def _asked_of(params: dict[str, Any] | None) -> int:
    asked = (params or {}).get("thinking_budget")
    return min(asked, NONE) if isinstance(asked, int) and asked >= 0 else NONE


def _model_of(req: Req) -> Model:
    return budget_model(req.custom_logit_processor)
