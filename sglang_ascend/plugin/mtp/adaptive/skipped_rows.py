"""What the MTP layer has skipped, on a server: where it is kept, and prompts that begin with it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ascend import env
from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.plugin.mtp.forwards import MTPForwards, StepModels
from sglang_ascend.speculative.forwards import Requests, Rows
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.skipped.catch_up import catch_up


def make_skipped(target_worker: Any, is_separate_model: bool) -> SkippedRows:
    """A row for each slot of the KV pool; a separate model reads no state of the target. Raises
    StartupRefused where they do not fit beside the pool."""
    runner = target_worker.model_runner
    num_slots = runner.max_total_num_tokens + runner.page_size
    hidden_size = 0 if is_separate_model else runner.model_config.spec_hidden_size
    kind = runner.dtype, runner.device
    try:
        return SkippedRows(num_slots, hidden_size, *kind, rows_depend=is_separate_model)
    except RuntimeError as error:  # of any device's allocator
        raise StartupRefused(
            f"No memory is left for {hidden_size} values of each of {num_slots} KV slots, which "
            "steps that leave the MTP layer out keep for it: lower --mem-fraction-static or "
            f"--max-total-tokens, or drop --speculative-adaptive and {env.LOOKUP_DRAFTS.name}."
        ) from error


def before_prefill(skipped: SkippedRows, batch: ScheduleBatch, models: StepModels) -> None:
    """What the prompts begin with is caught up, the rest is the prefill's."""
    if skipped.any_kept and any(batch.prefix_lens):
        _catch_up(skipped, batch, models, torch.tensor(batch.prefix_lens, device=batch.device))
    skipped.forget(batch.out_cache_loc)


def before_replay(
    skipped: SkippedRows, batch: ScheduleBatch, models: StepModels, num_drafts: int
) -> None:
    """The host's part of a step of K = ``num_drafts`` that was captured. Waits for the device where
    a step drafts again."""
    if num_drafts == 0:
        skipped.were_kept()
    elif skipped.is_behind:
        _catch_up(skipped, batch, models, batch.seq_lens)
        skipped.is_behind = False


def _catch_up(
    skipped: SkippedRows, batch: ScheduleBatch, models: StepModels, lens: torch.Tensor
) -> None:
    """The MTP layer on what it skipped of the first ``lens`` positions of each request."""
    table, forwards = slot_table(batch, lens), MTPForwards(models)
    # What is run are views of this batch, with rows of their own.
    rows = Rows(lens, lens, StepMetadata(table, lens, page_size=1, query_len=1))
    requests = Requests(lens, batch.req_pool_indices, table, max_kv_len=table.shape[1])
    forwards.begin(rows, lens, requests)
    catch_up(skipped, forwards, table, lens)


def slot_table(batch: ScheduleBatch, lens: torch.Tensor) -> torch.Tensor:
    """Slots of the first tokens of each request, int64 [batch, longest]."""
    table = batch.req_to_token_pool.req_to_token
    return table[batch.req_pool_indices, : int(lens.max())].long()
