"""SGLang's scheduler in this process on the emulated NPU: requests in; tokens and counts out."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from npu_emulation.counters import counted, left_undone
from npu_emulation.device_work import raise_failures, seconds_of_work
from npu_emulation.numerics import Numerics
from npu_emulation.report import Iteration, Report, Request
from npu_emulation.stand_ins import launched as stand_ins_launched

IDLE_ITERATIONS = 200  # without a batch while requests are unfinished: the scheduler is stuck


class CountedLoop:
    """Gives the scheduler's loop the waves of requests, each when the last one has finished."""

    def __init__(self, scheduler: Any, waves: Sequence[Sequence[Request]]) -> None:
        self.scheduler, self.waves, self.wave = scheduler, iter(waves), -1
        self.iterations: list[Iteration] = []
        self.requests: list[Any] = []  # SGLang's
        self._turn: Iterator[None] | None = None
        self._batch: tuple[str, int] | None = None
        self._idle = 0
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
        if all(request.finished() for request in self.requests):
            self._begin_wave()
        elif self._idle > IDLE_ITERATIONS:
            raise RuntimeError("the scheduler no longer runs batches, and requests are unfinished.")
        self._turn = self._counted_turn()
        next(self._turn)
        return []

    def _counted_turn(self) -> Iterator[None]:
        self._batch, first = None, len(stand_ins_launched)
        started, worked = time.perf_counter(), seconds_of_work()
        with counted() as counts:
            yield
        host_seconds = time.perf_counter() - started - (seconds_of_work() - worked)
        self._idle += 1
        if self._batch is not None:
            self._idle = 0
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

    def _begin_wave(self) -> None:
        wave = next(self.waves, None)
        if wave is None:
            self.scheduler.gracefully_exit = True
            return
        self.wave += 1
        names = [str(len(self.requests) + number) for number in range(len(wave))]
        self.scheduler.process_input_requests(
            [_tokenized(name, request) for name, request in zip(names, wave, strict=True)]
        )
        waiting = {request.rid: request for request in self.scheduler.waiting_queue}
        self.requests += [waiting[name] for name in names]


def serve(arguments: Sequence[str], waves: Sequence[Sequence[Request]]) -> Report:
    """Serve as `python -m sglang.launch_server ARGUMENTS` would; once per process."""
    with Numerics() as numerics:
        scheduler = started(arguments)
        loop = CountedLoop(scheduler, waves)
        scheduler.run_event_loop()
    return Report(
        names(scheduler),
        tokens=[list(request.output_ids_through_stop) for request in loop.requests],
        cached_tokens=[request.cached_tokens for request in loop.requests],
        iterations=loop.iterations,
        not_counted=dict(numerics.not_counted),
        left_undone=left_undone(),
    )


def started(arguments: Sequence[str]) -> Any:
    """What launch_server does in its process, then run_scheduler_process in its own."""
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.managers import scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(list(arguments))
    server_args.resolve_once()
    _set_envs_and_config(server_args)
    ports = PortArgs.init_new(server_args)
    rank = spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    scheduler.configure_scheduler_process(server_args, 0, display_tp_rank=0)
    return scheduler.Scheduler(server_args, ports)


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
    )
