"""HCCL between two processes, by torch_npu's own process group: a collective is work of a stream,
which runs in its place there, as late as the waits allow, and has what every rank gave.

One pair of processes runs all of collective_programs.py; each test looks at what it found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_emulation.collective_programs import of_rank
from npu_emulation.rank_programs import RANKS, found_by_ranks

OURS, OF_BOTH = [of_rank(rank) for rank in range(RANKS)], of_rank(0) + of_rank(1)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    return found_by_ranks("collective_programs", tmp_path_factory.mktemp("ranks"))


def of_ranks(found: list[dict[str, Any]], program: str) -> list[Any]:
    return [of_one[program] for of_one in found]


def test_all_reduce_gives_each_rank_the_sum_and_the_maximum(found):
    wanted = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        first, second = of_rank(0, dtype), of_rank(1, dtype)
        wanted[f"{dtype} SUM"] = (first + second).tolist()
        wanted[f"{dtype} MAX"] = torch.maximum(first, second).tolist()
    assert of_ranks(found, "reduced") == [wanted] * 2


def test_all_gather_gives_each_rank_every_part_in_the_ranks_order(found):
    assert of_ranks(found, "gathered") == [torch.cat(OURS).tolist()] * 2


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(found):
    assert of_ranks(found, "scattered") == OF_BOTH.view(2, 2).tolist()


def test_a_broadcast_and_a_send_overwrite_the_other_rank_s(found):
    assert of_ranks(found, "broadcast") == [OURS[1].tolist()] * 2
    assert of_ranks(found, "sent") == [OURS[0].tolist()] * 2


def test_a_collective_is_one_launch_and_no_wait(found):
    assert of_ranks(found, "counts") == [[["HcclAllReduce"], {"launches": 1}]] * 2


def test_it_has_not_run_before_the_host_waits(found):
    assert of_ranks(found, "late") == [[ours.tolist(), OF_BOTH.tolist()] for ours in OURS]


def test_it_runs_behind_the_kernel_before_it_and_ahead_of_the_one_after_it(found):
    assert of_ranks(found, "between") == [(2 * OF_BOTH + 1).tolist()] * 2


def test_a_kernel_that_does_not_wait_for_it_sees_the_rank_s_own_numbers(found):
    for rank, (forgot, queued, waited, left) in enumerate(of_ranks(found, "forgotten_wait")):
        assert forgot == (OURS[rank] + 1).tolist()
        assert queued == 1
        assert waited == (OF_BOTH + 1).tolist()
        assert left == 0


def test_a_captured_one_runs_in_every_replay_which_is_one_launch(found):
    replay = {"launches": 1, "graph_replays": 1}
    results = [(2 * (OF_BOTH + 2 * added) + 1).tolist() for added in (0, 100)]
    assert of_ranks(found, "replayed") == [[replay, results[0], replay, results[1]]] * 2


def test_a_rank_s_device_goes_on_for_a_peer_while_its_host_waits_for_another_host(found):
    assert of_ranks(found, "waits_in_another_order") == [OF_BOTH.tolist()] * 2


def test_ranks_that_run_different_collectives_are_told_so(found):
    for error in of_ranks(found, "different_sizes"):
        assert "all-reduce of 4 " in error
        assert "all-reduce of 3 " in error
        assert "a device would hang" in error


def test_nothing_of_it_is_a_stub(found):
    assert of_ranks(found, "left_undone") == [[]] * 2
