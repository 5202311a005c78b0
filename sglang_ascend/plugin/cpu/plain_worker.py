"""SGLang's worker on CPU, with what a request's parameters mean in a server without speculation."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ascend.plugin.mtp.disaggregation import keep_indices_on_host
from sglang_ascend.plugin.requests.penalties import RequestPenalties, asks_penalties
from sglang_ascend.plugin.requests.prompt_embeddings import embed_other_prompts
from sglang_ascend.plugin.requests.seeds import RequestSeeds, SeededSampler
from sglang_ascend.plugin.requests.weight_updates import follow_weight_updates


class PlainWorker(TpModelWorker):
    """Where an algorithm speculates, its worker does all this; the target's stays SGLang's."""

    penalties: RequestPenalties | None = None

    def _init_model_runner(self) -> None:
        super()._init_model_runner()
        if self.model_runner.spec_algorithm.is_none():
            self.model_runner.sampler = SeededSampler()
            follow_weight_updates(self.model_runner)
        self.seeds = RequestSeeds()

    def forward_batch_generation(
        self,
        batch: ScheduleBatch | None,
        forward_batch: Any = None,
        pp_proxy_tensors: Any = None,
        is_verify: bool = False,
        skip_attn_backend_init: bool | None = None,
        *,
        capture_hidden_mode: Any = None,
        return_kv_loc_plan: bool = False,
    ) -> GenerationBatchResult:
        if batch is not None and batch.spec_algorithm.is_none():
            self._prepare(batch)
        return super().forward_batch_generation(
            batch,
            forward_batch,
            pp_proxy_tensors,
            is_verify,
            skip_attn_backend_init,
            capture_hidden_mode=capture_hidden_mode,
            return_kv_loc_plan=return_kv_loc_plan,
        )

    def _prepare(self, batch: ScheduleBatch) -> None:
        keep_indices_on_host(batch)
        if batch.forward_mode.is_extend():
            embed_other_prompts(batch, self.model_runner.model)
        if not batch.sampling_info.is_all_greedy:
            self.seeds.give(batch)
        if not asks_penalties(batch):
            return
        if self.penalties is None:
            runner = self.model_runner
            num_rows = len(runner.req_to_token_pool.req_to_token)
            vocab_size = runner.model_config.vocab_size
            self.penalties = RequestPenalties(num_rows, vocab_size, runner.device)
        if batch.forward_mode.is_decode():
            self.penalties.decode(batch)
        elif batch.forward_mode.is_extend():
            self.penalties.prefill(batch)
