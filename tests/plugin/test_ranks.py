"""Each rank has its own cores, every rank keeps rank 0's draw, and heads are never split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]


@pytest.mark.parametrize(
    ("cores", "num_ranks", "expected"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2, 3, 4, 5, 6, 7], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([3, 5, 8], 2, [[3], [5]]),
        ([4], 2, [[4], [4]]),
        ([0, 1], 3, [[0], [1], [0]]),
    ],
)
def test_ranks_get_as_many_cores_each(cores, num_ranks, expected):
    from sglang_ascend.plugin.mtp.ranks import cores_of_rank

    assert [cores_of_rank(cores, rank, num_ranks) for rank in range(num_ranks)] == expected


@pytest.fixture
def clean_environment(monkeypatch):
    from sglang_ascend.plugin.mtp import ranks

    monkeypatch.setattr(ranks, "get_cpu_ids_by_node", lambda: ["0,1"])
    environment: dict[str, str] = {}
    calls = SimpleNamespace(environ=environment, sched_getaffinity=lambda pid: {0, 1})
    monkeypatch.setattr(ranks, "os", calls)
    return environment


def test_more_ranks_than_numa_nodes_share_the_cores(clean_environment):
    from sglang_ascend.plugin.mtp.ranks import CORES_OF_RANKS, share_machine

    share_machine(1)
    assert clean_environment == {}
    share_machine(2)
    assert clean_environment == {
        CORES_OF_RANKS: "0|1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    }


def test_the_environment_has_the_last_word(clean_environment):
    from sglang_ascend.plugin.mtp.ranks import CORES_OF_RANKS, share_machine

    given = {CORES_OF_RANKS: "1|0", "OMP_NUM_THREADS": "7"}
    clean_environment |= given
    share_machine(2)
    assert given.items() <= clean_environment.items()


@pytest.mark.parametrize(("num_heads", "tp_size"), [(9, 2), (6, 4)])
def test_a_size_that_does_not_divide_the_heads_is_refused(monkeypatch, num_heads, tp_size):
    from sglang_ascend.plugin.errors import StartupRefused
    from sglang_ascend.plugin.mtp import ranks

    config = SimpleNamespace(num_attention_heads=num_heads)
    monkeypatch.setattr(ranks, "model_config_of", lambda server_args: config)
    ranks.refuse_uneven_heads(SimpleNamespace(tp_size=1))
    ranks.refuse_uneven_heads(SimpleNamespace(tp_size=3))
    with pytest.raises(StartupRefused, match=f"--tp-size {tp_size} .* {num_heads} attention"):
        ranks.refuse_uneven_heads(SimpleNamespace(tp_size=tp_size))


@pytest.mark.parametrize("attn_dp_size", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_of_a_batch_keeps_the_first_ones_draw(monkeypatch, num_ranks, attn_dp_size):
    from sglang_ascend.plugin.mtp import ranks

    waited: list[torch.Tensor] = []

    def group_of(*of_first_rank: int) -> SimpleNamespace:
        def broadcast(numbers: torch.Tensor, root: int) -> SimpleNamespace:
            sent = [torch.tensor(of_first_rank)][root]
            return SimpleNamespace(wait=lambda: waited.append(numbers.copy_(sent)))

        return SimpleNamespace(broadcast=broadcast)

    devices, hosts = group_of(5, 6), group_of(1, 0)
    group = SimpleNamespace(world_size=num_ranks, device_group=devices, cpu_group=hosts)
    alone = SimpleNamespace(world_size=1)
    parallel = {
        1: SimpleNamespace(attn_dp_size=1, tp_group=group, attn_tp_group=alone),
        # Ranks of other requests draw for themselves.
        2: SimpleNamespace(attn_dp_size=2, tp_group=alone, attn_tp_group=group),
    }[attn_dp_size]
    monkeypatch.setattr(ranks, "get_parallel", lambda: parallel)
    tokens = ranks.draw_of_first_rank(torch.tensor([7, 8]))
    assert tokens.tolist() == ([7, 8] if num_ranks == 1 else [5, 6])
    assert len(waited) == num_ranks - 1
    # What is no tensor of the device is the hosts' to tell.
    assert ranks.decision_of_first_rank(7, 8) == ((7, 8) if num_ranks == 1 else (1, 0))
