"""What the MTP layer has skipped, on a server: where it is kept, and prompts that begin with it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.plugin.mtp.forwards import MTPForwards, StepModels
from sglang_ascend.speculative.forwards import Requests, Rows
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.skipped.catch_up import catch_up


def make_skipped(target_worker: Any, is_separate_model: bool) -> SkippedRows:
    """A row for each slot of the KV pool; a separate model reads no state of the target."""
    runner = target_worker.model_runner
    return SkippedRows(
        runner.max_total_num_tokens + runner.page_size,
        0 if is_separate_model else runner.model_config.spec_hidden_size,
        runner.dtype,
        runner.device,
        rows_depend=is_separate_model,
    )


def before_prefill(skipped: SkippedRows, batch: ScheduleBatch, models: StepModels) -> None:
    """What the prompts begin with is caught up, the rest is the prefill's."""
    if skipped.any_kept and any(batch.prefix_lens):
        lens = torch.tensor(batch.prefix_lens, device=batch.device)
        table, forwards = slot_table(batch, lens), MTPForwards(models)
        # What is run are views of this batch, with rows of their own.
        rows = Rows(lens, lens, StepMetadata(table, lens, page_size=1, query_len=1))
        requests = Requests(lens, batch.req_pool_indices, table, max_kv_len=int(lens.max()))
        forwards.begin(rows, lens, requests)
        catch_up(skipped, forwards, table, lens)
    skipped.forget(batch.out_cache_loc)


def slot_table(batch: ScheduleBatch, lens: torch.Tensor) -> torch.Tensor:
    """Slots of the first tokens of each request, int64 [batch, longest]."""
    table = batch.req_to_token_pool.req_to_token
    return table[batch.req_pool_indices, : int(lens.max())].long()
