"""SGLang's scheduler in this process on the emulated NPU: requests in; tokens and counts out.

Each rank of a server is such a process and knows all waves. SGLang broadcasts to the ranks of a
request what the first of them asks for, as it does in a server.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from npu_emulation.collectives import has_run, hosts_meet
from npu_emulation.counters import counted, left_undone
from npu_emulation.device_work import raise_failures, seconds_of_work
from npu_emulation.followers import own_rank
from npu_emulation.numerics import Numerics
from npu_emulation.report import Iteration, Report, Request
from npu_emulation.stand_ins import launched as stand_ins_launched
from npu_emulation.stand_ins.transfers import HOST
from sglang_ascend.ops.npu.latents import untaken_latents
from sglang_ascend.speculative.config import NAME

IDLE_SECONDS = 200  # without a batch while requests are unfinished: the scheduler is stuck
IDLE_TURN = 0.002  # seconds: what it waits for may be another process, which wants the core


class CountedLoop:
    """Gives the scheduler's loop the waves of requests, each when the last one has finished."""

    def __init__(self, scheduler: Any, waves: Iterable[Sequence[Request]]) -> None:
        self.scheduler, self.waves, self.wave = scheduler, iter(waves), -1
        self.iterations: list[Iteration] = []
        self.requests: list[Any] = []  # SGLang's
        self.accepted = record_acceptance()
        self._turn: Iterator[None] | None = None
        self._batch: tuple[str, int] | None = None
        # A prefill server may have to wait until the decode server has room.
        is_prefill = scheduler.disagg_prefill_bootstrap_queue is not None
        self._patience = math.inf if is_prefill else IDLE_SECONDS
        self._last_batch_at = time.monotonic()
        self._run_batch = scheduler.run_batch
        scheduler.run_batch = self.run_batch
        scheduler.ingest_requests = self.ingest_requests

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch = (batch.forward_mode.name, len(batch.reqs))
        return self._run_batch(batch, *args, **kwargs)

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        """What begins each turn of the loop, in place of reading a socket."""
        raise_failures()
        if self._turn is not None:
            next(self._turn, None)
        asked = self._next_wave()
        with hosts_meet():
            asked = self.scheduler.request_receiver._broadcast_reqs_across_ranks(asked)
        self._take(asked)
        self._turn = self._counted_turn()
        next(self._turn)
        return []

    def _counted_turn(self) -> Iterator[None]:
        self._batch, first = None, len(stand_ins_launched)
        started, worked = time.perf_counter(), seconds_of_work()
        with counted() as counts:
            yield
        host_seconds = time.perf_counter() - started - (seconds_of_work() - worked)
        if self._batch is None:
            time.sleep(IDLE_TURN)
        else:
            self._last_batch_at = time.monotonic()
            self.iterations.append(
                Iteration(
                    self.wave,
                    *self._batch,
                    calls=counts.calls,
                    launched=counts.launched,
                    kernels=stand_ins_launched[first:],
                    host_seconds=host_seconds,
                )
            )

    def _next_wave(self) -> list[Any]:
        """What to ask for now: nothing while requests are unfinished, in the end to stop."""
        from sglang.srt.managers.io_struct import ShutdownReq

        is_finished = all(request.finished() for request in self.requests)
        if not is_finished and time.monotonic() - self._last_batch_at > self._patience:
            raise RuntimeError("the scheduler runs no batches, and requests are unfinished.")
        if not _in_every_rank(is_finished):
            return []
        wave = next(self.waves, None)
        if wave is None:
            return [ShutdownReq()]
        self.wave += 1
        first, group = len(self.requests), _attention_group()
        own = [request for request in wave if request.attention_group == group]
        return [_tokenized(str(number), request) for number, request in enumerate(own, first)]

    def _take(self, asked: list[Any]) -> None:
        if not asked:
            return
        self.scheduler.process_input_requests(asked)
        waiting = {request.rid: request for request in _waiting(self.scheduler)}
        self.requests += [waiting[request.rid] for request in asked if request.rid in waiting]


def serve(
    arguments: Sequence[str], waves: Iterable[Sequence[Request]], seed: int | None = None
) -> Report:
    """Serve as `python -m sglang.launch_server ARGUMENTS` would; once per process.

    `seed` is this rank's, in place of SGLang's, which is the same in every rank.
    """
    with Numerics(checks=calls_are_checked(arguments)) as numerics:
        scheduler = started(arguments)
        if seed is not None:
            torch.manual_seed(seed)
        loop = CountedLoop(scheduler, waves)
        scheduler.run_event_loop()
    return Report(
        names(scheduler),
        tokens=[list(request.output_ids_through_stop) for request in loop.requests],
        cached_tokens=[request.cached_tokens for request in loop.requests],
        accepted=[loop.accepted[request.rid] for request in loop.requests],
        iterations=loop.iterations,
        not_counted=dict(numerics.not_counted),
        left_undone=left_undone(),
        unchecked=sorted(numerics.unchecked),
        collectives=dict(has_run),
    )


def calls_are_checked(arguments: Sequence[str]) -> bool:
    """Those of MTP's servers, SGLang's part included; of other latents than are documented some are
    known to be excluded."""
    folder = Path(arguments[arguments.index("--model-path") + 1])
    config = json.loads((folder / "config.json").read_text())
    return NAME in arguments and not untaken_latents(config)


def started(arguments: Sequence[str]) -> Any:
    """What launch_server does in its process, then run_scheduler_process in its own."""
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.disagg_service import start_disagg_service
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(list(arguments))
    server_args.resolve_once()
    _set_envs_and_config(server_args)
    rank = own_rank()
    world_rank = spawn_world_rank(server_args, tp_rank=rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
    scheduler.configure_scheduler_process(server_args, rank, display_tp_rank=rank)
    if rank == 0:
        start_disagg_service()  # of a prefill server: where decode servers ask for it
    # As a rank of several; what it is given to connect to is asked and told nothing.
    ports = PortArgs.init_new(server_args, 0, [server_args.port])
    return scheduler.Scheduler(server_args, ports)


def _waiting(scheduler: Any) -> list[Any]:
    """The requests that have not begun; those of a prefill or decode server wait for the other."""
    prefill, decode = (
        [] if queue is None else queue.queue
        for queue in (
            scheduler.disagg_prefill_bootstrap_queue,
            scheduler.disagg_decode_prealloc_queue,
        )
    )
    return [*scheduler.waiting_queue, *prefill, *(waiting.req for waiting in decode)]


def _attention_group() -> int:
    """Whose requests this rank runs: its own group's under data-parallel attention, else all."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_dp_rank


def _in_every_rank(is_finished: bool) -> bool:
    """Ranks with requests of their own begin a wave together."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dp_size == 1:
        return is_finished
    finished = torch.tensor([is_finished], dtype=torch.int32)
    minimum, hosts = torch.distributed.ReduceOp.MIN, parallel.tp_group.cpu_group
    with hosts_meet():
        torch.distributed.all_reduce(finished, minimum, group=hosts)
    return bool(finished.item())


def record_acceptance() -> dict[str, list[list[int]]]:
    """By request, a pair for each step that SGLang counts from now on: tokens in the cache before
    it, drafts accepted."""
    from sglang.srt.managers.schedule_batch import Req

    accepted: dict[str, list[list[int]]] = defaultdict(list)
    count = Req.update_spec_correct_drafts_histogram

    def counted_and_recorded(request: Any, num_accepted: int) -> None:
        count(request, num_accepted)
        start = request.kv.kv_committed_len - num_accepted - 1
        accepted[request.rid].append([start, num_accepted])

    Req.update_spec_correct_drafts_histogram = counted_and_recorded
    return accepted


def names(scheduler: Any) -> dict[str, str]:
    """The classes that serve: SGLang falls back to others in silence."""
    from sglang.srt.platforms import current_platform

    target = scheduler.tp_worker.model_runner
    parts = {"platform": current_platform, "scheduler_loop": None, **_parts(target)}
    worker = getattr(scheduler, "draft_worker", None)
    if worker is not None:
        draft = getattr(worker, "draft_worker", worker)
        graphs = {name: part for name, part in vars(draft).items() if "graph_runner" in name}
        drafted = {**_parts(draft.draft_runner), **graphs}
        parts["speculative_worker"] = worker
        parts |= {f"draft_{name}": part for name, part in drafted.items()}
    found = {name: "none" if part is None else type(part).__name__ for name, part in parts.items()}
    return found | {"scheduler_loop": "overlap" if scheduler.enable_overlap else "normal"}


def _parts(runner: Any) -> dict[str, Any]:
    return {
        "model": runner.model,
        "attention": runner.attn_backend,
        "pool": runner.token_to_kv_pool,
        "allocator": runner.token_to_kv_pool_allocator,
        "graph_runner": runner.decode_cuda_graph_runner,
    }


def _tokenized(name: str, request: Request) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling_params = SamplingParams(**request.sampling_params)
    sampling_params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text="",
        input_ids=array("q", request.input_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling_params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        custom_logit_processor=request.custom_logit_processor,
        bootstrap_host=HOST if request.bootstrap_room else None,
        bootstrap_room=request.bootstrap_room,
    )
