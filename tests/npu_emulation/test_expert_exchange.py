"""What stands in for `deep_ep` brings each row to the ranks of its experts and adds up what comes
back, as a dense loop over tokens and experts does.

One pair of processes runs all of expert_programs.py; each test looks at what it found.
"""

from __future__ import annotations

from operator import mul
from typing import Any

import pytest
import torch

from npu_emulation import expert_programs as programs
from npu_emulation.rank_programs import RANKS, found_by_ranks
from npu_emulation.stand_ins.activation import swiglu_quant


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    return found_by_ranks("expert_programs", tmp_path_factory.mktemp("ranks"))


def dense(rank: int, added: int = 0) -> list[list[float]]:
    """Every token through every expert of its own, in float64."""
    x, of_experts = programs.tokens(rank, added).double(), programs.matrices().double()
    result = torch.zeros_like(x)
    for token, experts in enumerate(programs.CHOICES[rank]):
        for expert, weight in zip(experts, programs.weights(rank)[token].double(), strict=True):
            if expert >= 0:
                result[token] += weight * (x[token] @ of_experts[expert])
    return result.tolist()


def counts_of(rank: int) -> list[int]:
    """Rows of each of the rank's experts, from all ranks."""
    chosen = [expert for of_one in programs.CHOICES for row in of_one for expert in row]
    first = rank * programs.OF_A_RANK
    return [chosen.count(first + expert) for expert in range(programs.OF_A_RANK)]


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_each_token_gets_the_weighted_sum_of_its_experts(found, mode):
    for rank in range(RANKS):
        assert found[rank][mode] == [dense(rank), counts_of(rank)]


def test_rows_come_as_int8_by_expert_and_source_with_a_scale_for_each(found):
    for rank in range(RANKS):
        rows, scales = [], []
        for expert in range(rank * programs.OF_A_RANK, (rank + 1) * programs.OF_A_RANK):
            for source in range(RANKS):
                for token, chosen in enumerate(programs.CHOICES[source]):
                    if expert in chosen:
                        values = programs.tokens(source)[token].tolist()
                        scale = max(abs(value) for value in values) / 127
                        rows.append([round(value / scale) for value in values])
                        scales.append(scale)
        for found_rows, found_scales in found[rank]["quantized"]:
            assert found_rows == rows
            assert found_scales == pytest.approx(scales, rel=1e-6)


def by_int8(rank: int) -> list[list[float]]:
    """Every token, rounded to int8 by a scale of its own, through every expert of its own."""
    x, of_experts = programs.tokens_of_many_sizes(rank).tolist(), programs.matrices().tolist()
    result = []
    for row, experts in zip(x, programs.CHOICES[rank], strict=True):
        scale = max(abs(value) for value in row) / 127
        rounded = [round(value / scale) * scale for value in row]
        total = [0.0] * programs.HIDDEN
        for expert, weight in zip(experts, (0.5, 0.25), strict=True):
            if expert >= 0:
                columns = zip(*of_experts[expert], strict=True)
                products = (sum(map(mul, rounded, column)) for column in columns)
                total = [sum_ + weight * value for sum_, value in zip(total, products, strict=True)]
        result.append(total)
    return result


def test_int8_and_its_scales_give_the_products_of_rounded_rows(found):
    bfloat16 = {"rel": 2**-7, "abs": 1e-6}  # an expert's product is rounded, and the sum
    for rank in range(RANKS):
        wanted = by_int8(rank)
        for of_mode in found[rank]["int8"]:
            for row, of_token in zip(of_mode, wanted, strict=True):
                assert row == pytest.approx(of_token, **bfloat16)
        for of_mode in found[rank]["int8_with_scales_of_other_rows"]:
            pairs = list(zip(of_mode, wanted, strict=True))
            assert any(row != pytest.approx(of_token, **bfloat16) for row, of_token in pairs)


def test_the_layout_counts_tokens_by_rank_and_expert(found):
    for rank in range(RANKS):
        chosen = programs.CHOICES[rank]
        ranks = [{expert // programs.OF_A_RANK for expert in row if expert >= 0} for row in chosen]
        of_ranks = [sum(one in of_token for of_token in ranks) for one in range(RANKS)]
        of_experts = [sum(row.count(e) for row in chosen) for e in range(programs.EXPERTS)]
        is_for = [[one in of_token for one in range(RANKS)] for of_token in ranks]
        assert found[rank]["layout"] == [of_ranks, of_experts, is_for]


def test_the_host_waits_for_the_counts_of_normal_mode_only(found):
    for of_low_latency, of_normal in (of_one["waits"] for of_one in found):
        assert of_low_latency == 0
        assert of_normal > 0


def test_low_latency_is_captured_and_exchanged_anew_in_every_replay(found):
    replay = {"launches": 1, "graph_replays": 1}
    for rank in range(RANKS):
        assert found[rank]["replayed"] == [replay, dense(rank), replay, dense(rank, added=1)]
        assert dense(rank) != dense(rank, added=1)


def test_low_latency_behind_normal_mode_wants_a_cleaned_buffer(found):
    for rank in range(RANKS):
        cleaned, error = found[rank]["after_normal"]
        assert cleaned == dense(rank)
        assert "call clean_low_latency_buffer" in error


def test_more_tokens_than_the_buffers_hold_are_refused(found):
    for rank in range(RANKS):
        held = programs.NUM_TOKENS[rank] - 1
        assert f"buffers hold {held}" in found[rank]["too_many_tokens"]


def test_rows_that_are_not_sorted_by_expert_are_caught(found):
    assert all(found[rank]["unsorted"] != dense(rank) for rank in range(RANKS))


def test_nothing_of_it_is_a_stub(found):
    assert [of_one["left_undone"] for of_one in found] == [[]] * RANKS


def test_the_activation_takes_the_rows_that_have_an_expert(numerics):
    x, counts = torch.randn(6, 8).bfloat16(), torch.tensor([3, 0, 1])
    result, _ = swiglu_quant(x.to("npu"), counts.to("npu"), 1, need_quant=False)
    gate, up = x[:4].double().chunk(2, -1)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(result[:4].cpu().double(), wanted, rtol=2**-8, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(result[:4].cpu().double(), wanted.flip(0), rtol=2**-8, atol=0)
