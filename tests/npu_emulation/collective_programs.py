"""python -m npu_emulation.collective_programs RANK FOLDER: what each of two ranks runs on its NPU
(rank_programs.py, test_collectives.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from npu_emulation.collectives import CollectiveError
from npu_emulation.counters import counted, num_pending
from npu_emulation.device_work import alias, raise_failures
from npu_emulation.rank_programs import RANKS, hosts_meet, main


def of_rank(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the rank has, on the host."""
    return torch.tensor([1.5, -2.0, 7.0, 4.0]).add(10 * rank).to(dtype)


def on_device(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return of_rank(rank, dtype).to("npu")


def reduced(rank: int) -> Any:
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = on_device(rank, dtype)
            dist.all_reduce(tensor, reduction)
            found[f"{dtype} {reduction.name}"] = tensor.tolist()
    return found


def gathered(rank: int) -> Any:
    result = torch.empty(4 * RANKS, device="npu")
    dist.all_gather_into_tensor(result, on_device(rank))
    return result.tolist()


def scattered(rank: int) -> Any:
    result = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(result, on_device(rank))
    return result.tolist()


def broadcast(rank: int) -> Any:
    tensor = on_device(rank)
    dist.broadcast(tensor, src=1)
    return tensor.tolist()


def sent(rank: int) -> Any:
    tensor = on_device(rank)
    dist.send(tensor, dst=1) if rank == 0 else dist.recv(tensor, src=0)
    return tensor.tolist()


def counts(rank: int) -> Any:
    tensor = on_device(rank)
    with counted() as found:
        dist.all_reduce(tensor)
    torch.npu.synchronize()
    return [found.launched, found.without_mallocs]


def late(rank: int) -> Any:
    """What is in memory before the host waits and after it."""
    tensor = on_device(rank)
    dist.all_reduce(tensor)
    before = alias(tensor).tolist()
    hosts_meet()
    torch.npu.current_stream().synchronize()
    return [before, alias(tensor).tolist()]


def between(rank: int) -> Any:
    tensor = on_device(rank) * 2
    dist.all_reduce(tensor)
    return (tensor + 1).tolist()


def forgotten_wait(rank: int) -> Any:
    """A kernel behind a collective whose work was not waited for, and what is queued then."""
    tensor = on_device(rank)
    work = dist.all_reduce(tensor, async_op=True)
    forgot = (tensor + 1).tolist()
    queued = num_pending()
    hosts_meet()
    work.wait()
    return [forgot, queued, (tensor + 1).tolist(), num_pending()]


def replayed(rank: int) -> Any:
    graph, tensor = torch.npu.NPUGraph(), on_device(rank)
    dist.all_reduce(tensor)  # makes the communicator
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        summed = tensor * 2
        dist.all_reduce(summed)
        result = summed + 1
    found = []
    for added in (0, 100):
        tensor.copy_(of_rank(rank) + added)
        with counted() as replay:
            graph.replay()
        found += [replay.calls, result.tolist()]
    return found


def waits_in_another_order(rank: int) -> Any:
    """Rank 0 waits for its device and then for rank 1's host, which waits for its device later."""
    tensor = on_device(rank)
    dist.all_reduce(tensor)
    if rank == 0:
        torch.npu.synchronize()
    hosts_meet()
    return tensor.tolist()


def different_sizes(rank: int) -> Any:
    tensor = on_device(rank)[: 4 - rank]
    dist.all_reduce(tensor)
    try:
        torch.npu.synchronize()
        raise_failures()
    except CollectiveError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    main(
        reduced,
        gathered,
        scattered,
        broadcast,
        sent,
        counts,
        late,
        between,
        forgotten_wait,
        replayed,
        waits_in_another_order,
        different_sizes,
    )
