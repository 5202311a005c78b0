"""Models whose forward costs nothing, and the time of every scheduler iteration.

Only ``model.forward`` is replaced: batches, attention metadata, sampling, verification, relay, KV
allocation and result processing stay what they are. Target row j says token 10 + j; the MTP layer
drafts token 10 and then others, so that every step accepts one draft and emits two tokens.
$STEP_TIMES names the file that gets [batch size, seconds] of every decode iteration when idle.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

MAX_ROWS = 128 * 16
FIRST_TOKEN, OTHER_TOKEN = 10, 3
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class InstantModel:
    """In place of one model's forward: slices of tensors made once."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: Any) -> None:
        self.logits = torch.zeros(MAX_ROWS, vocab_size, dtype=dtype, device=device)
        self.hidden = torch.zeros(MAX_ROWS, hidden_size, dtype=dtype, device=device)
        self.said: int | None = None

    def say(self, width: int) -> None:
        """Row r says token 10 + r mod width; width 0: another token in every row."""
        if self.said == width:
            return
        self.said = width
        rows = torch.arange(MAX_ROWS, device=self.logits.device)
        tokens = FIRST_TOKEN + rows % width if width else torch.full_like(rows, OTHER_TOKEN)
        self.logits.zero_()
        self.logits[rows, tokens] = 1


def instant_forward(runner: Any) -> Any:
    config = runner.model_config
    make = (config.vocab_size, config.hidden_size, runner.dtype, runner.device)
    # One for each kind of forward, so that nothing is written between steps.
    instant = {kind: InstantModel(*make) for kind in ("decode", "verify", "extend")}

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, **kwargs: Any
    ) -> LogitsProcessorOutput:
        mode, num_rows, num_logits = batch.forward_mode, len(input_ids), batch.batch_size
        if mode.is_target_verify():
            model, num_logits = instant["verify"], num_rows
            model.say(batch.spec_info.draft_token_num)
        elif mode.is_decode():
            model = instant["decode"]
            model.say(0)
        else:
            model = instant["extend"]
            model.say(1)
            if mode.is_draft_extend_v2() and batch.spec_info.select_index is None:
                num_logits = num_rows
        full = batch.capture_hidden_mode.is_full()
        return LogitsProcessorOutput(
            next_token_logits=model.logits[:num_logits],
            hidden_states=model.hidden[: num_rows if full else num_logits],
        )

    return forward


def replace_forward(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``ModelRunner.load_model``."""
    runner.model.forward = instant_forward(runner)
    return result


class Clock:
    """Seconds from one ``get_next_batch_to_run`` to the next, of iterations that decoded."""

    def __init__(self) -> None:
        self.times: list[tuple[float, ...]] = []
        self.last: float | None = None

    def tick(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        batch = scheduler.last_batch
        if self.last is not None and batch is not None and batch.forward_mode.is_decode():
            self.times.append((batch.batch_size(), now - self.last))
        self.last = now
        return original(scheduler, *args, **kwargs)

    def flush(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """After ``Scheduler.on_idle``."""
        self.last = None
        if self.times:
            path = Path(os.environ["STEP_TIMES"])
            path.with_suffix(".part").write_text(json.dumps(self.times))
            path.with_suffix(".part").rename(path)
            self.times = []
        return result


def register_clock(clock: Clock) -> None:
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", clock.tick, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.on_idle", clock.flush, HookType.AFTER)


def install() -> None:
    HookRegistry.register(f"{_MODEL_RUNNER}.load_model", replace_forward, HookType.AFTER)
    register_clock(Clock())
