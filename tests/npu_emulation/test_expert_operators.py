"""Experts, quantization and the sampling filter on the emulated NPU are what loops say.

Called through the real torch_npu, whose shapes and types they must have; mistakes are caught.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch_npu

from npu_emulation.goldens import moe, quantized
from npu_emulation.goldens.registry import GOLDENS

TOKENS, EXPERTS, CHOICES, WIDTH = 6, 16, 3, 8


def chosen(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:count]


def grouped_choice(x: torch.Tensor, bias: torch.Tensor, groups: int, kept_groups: int):
    """One token: experts and weights by DeepSeek's rule, in float64."""
    probabilities = [1 / (1 + math.exp(-float(value))) for value in x]
    biased = [p + float(b) for p, b in zip(probabilities, bias, strict=True)]
    size = len(biased) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    group_scores = [sum(sorted(biased[i] for i in group)[-2:]) for group in members]
    kept = chosen(group_scores, kept_groups)
    allowed = [biased[i] if i // size in kept else -math.inf for i in range(len(biased))]
    experts = chosen(allowed, CHOICES)
    total = sum(probabilities[i] for i in experts)
    return experts, [2.5 * probabilities[i] / total for i in experts]


def check_grouped_gate() -> None:
    x, bias = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)
    weights, experts, _ = torch_npu.npu_moe_gating_top_k(
        x.to("npu"),
        CHOICES,
        bias=bias.to("npu"),
        k_group=2,
        group_count=4,
        group_select_mode=1,
        norm_type=1,
        routed_scaling_factor=2.5,
    )
    wanted = [grouped_choice(row, bias, groups=4, kept_groups=2) for row in x]
    assert experts.tolist() == [row for row, _ in wanted]
    torch.testing.assert_close(weights.cpu(), torch.tensor([row for _, row in wanted]))


def test_the_grouped_gate_chooses_by_biased_and_weighs_by_unbiased_scores(numerics):
    check_grouped_gate()


def test_a_gate_that_weighs_by_biased_scores_is_caught(numerics, monkeypatch):
    right = moe.moe_gating_top_k

    def biased(
        x, k, bias, k_group, group_count, group_select_mode, norm_type, routed_scaling_factor
    ):
        choice = (k, bias, k_group, group_count, group_select_mode, 0, norm_type, False)
        weights, experts, _ = right(x, *choice, routed_scaling_factor)
        return weights + bias[experts.long()], experts, None

    monkeypatch.setitem(GOLDENS, "npu::npu_moe_gating_top_k", biased)
    with pytest.raises(AssertionError):
        check_grouped_gate()


def test_the_softmax_gate_takes_the_largest_without_renormalising(numerics):
    x = torch.randn(TOKENS, EXPERTS)
    weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.to("npu"), k=CHOICES)
    for token, row in enumerate(x.double().tolist()):
        total = sum(math.exp(value) for value in row)
        best = chosen(row, CHOICES)
        assert experts[token].tolist() == best
        wanted = torch.tensor([math.exp(row[i]) / total for i in best])
        torch.testing.assert_close(weights[token].cpu(), wanted)
        assert rows[token].tolist() == [j * TOKENS + token for j in range(CHOICES)]


def experts_of_tokens() -> torch.Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).int()


def check_experts_layer(row_index_type: int) -> None:
    """Route, multiply and sum: every token gets the weighted products of its experts."""
    x, choice = torch.randn(TOKENS, WIDTH), experts_of_tokens()
    weight, scales = torch.randn(EXPERTS, WIDTH, 4), torch.rand(TOKENS, CHOICES)
    rows, index, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.to("npu"),
        choice.to("npu"),
        active_num=TOKENS * CHOICES,
        expert_num=EXPERTS,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, EXPERTS],
        row_idx_type=row_index_type,
    )
    assert counts.tolist() == [int((choice == expert).sum()) for expert in range(EXPERTS)]
    (products,) = torch_npu.npu_grouped_matmul(
        [rows], [weight.to("npu")], group_list=counts, group_list_type=1, split_item=2, group_type=0
    )
    if row_index_type == 1:  # (token, choice) of each row, turned into the row of each
        index = torch.empty_like(index).scatter_(
            0, index.long(), torch.arange(index.numel(), dtype=index.dtype, device="npu")
        )
    result = torch_npu.npu_moe_finalize_routing(
        products, None, None, None, scales.to("npu"), index, None, drop_pad_mode=2
    )
    wanted = torch.zeros(TOKENS, 4, dtype=torch.float64)
    for token in range(TOKENS):
        for place, expert in enumerate(choice[token].tolist()):
            product = x[token].double() @ weight[expert].double()
            wanted[token] += product * scales[token, place].double()
    torch.testing.assert_close(result.cpu(), wanted.float())


@pytest.mark.parametrize("row_index_type", [0, 1])
def test_routing_products_and_sum_are_a_layer_of_experts(numerics, row_index_type):
    check_experts_layer(row_index_type)


def test_an_experts_sum_that_reads_choice_by_choice_is_caught(numerics, monkeypatch):
    def transposed(expanded_permuted_rows, scales, expanded_src_to_dst_row, drop_pad_mode):
        return moe.moe_finalize_routing(
            expanded_permuted_rows, None, None, None, scales, expanded_src_to_dst_row, None
        )

    monkeypatch.setitem(GOLDENS, "npu::npu_moe_finalize_routing", transposed)
    with pytest.raises(AssertionError):
        check_experts_layer(0)


def test_tokens_of_experts_elsewhere_have_no_row(numerics):
    choice = experts_of_tokens()
    x = torch.randn(TOKENS, WIDTH)
    rows, index, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.to("npu"),
        choice.to("npu"),
        active_num=-1,
        expert_num=EXPERTS,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[4, 8],
    )
    assert counts.tolist() == [int((choice == expert).sum()) for expert in range(4, 8)]
    for place, expert in enumerate(choice.flatten().tolist()):
        row = index[place].item()
        assert (row >= 0) == (4 <= expert < 8)
        if row >= 0:
            assert torch.equal(rows[row].cpu(), x[place // CHOICES])


def check_quantized_product() -> None:
    x, weight = torch.randn(TOKENS, WIDTH), torch.randint(-127, 128, (WIDTH, 4), dtype=torch.int8)
    scale = torch.rand(4) + 0.1
    quantized_x, row_scale = torch_npu.npu_dynamic_quant(x.to("npu"))
    for row, integers, step in zip(x, quantized_x.tolist(), row_scale.tolist(), strict=True):
        assert math.isclose(step, max(abs(float(value)) for value in row) / 127, rel_tol=1e-6)
        for value, integer in zip(row.tolist(), integers, strict=True):
            assert abs(value / step - integer) <= 0.5 + 1e-4
    result = torch_npu.npu_quant_matmul(
        quantized_x,
        weight.to("npu"),
        scale.to("npu"),
        pertoken_scale=row_scale,
        output_dtype=torch.float16,
    )
    for token in range(TOKENS):
        for column in range(4):
            terms = zip(quantized_x[token].tolist(), weight[:, column].tolist(), strict=True)
            total = Fraction(sum(a * b for a, b in terms))
            wanted = float(total) * float(scale[column]) * row_scale[token].item()
            assert math.isclose(result[token, column].item(), wanted, rel_tol=2e-3, abs_tol=1e-3)


def test_dynamic_quantization_and_the_integer_product_undo_each_other_s_scales(numerics):
    check_quantized_product()


def test_a_product_without_the_rows_scale_is_caught(numerics, monkeypatch):
    def without(x1, x2, scale, pertoken_scale, output_dtype):
        return quantized.quant_matmul(x1, x2, scale, output_dtype=output_dtype)

    monkeypatch.setitem(GOLDENS, "npu::npu_quant_matmul", without)
    with pytest.raises(AssertionError):
        check_quantized_product()


def test_a_product_permutes_its_operands_and_its_result(numerics):
    x, weight = torch.randn(3, 2, 5), torch.randn(2, 4, 5)
    result = torch_npu.npu_transpose_batchmatmul(
        x.to("npu"), weight.to("npu"), perm_x1=[1, 0, 2], perm_x2=[0, 2, 1], perm_y=[1, 0, 2]
    )
    wanted = [[weight[b].double() @ x[m, b].double() for b in range(2)] for m in range(3)]
    torch.testing.assert_close(
        result.cpu(), torch.stack([torch.stack(row) for row in wanted]).float()
    )


def kept_places(row: list[float], k: int, p: float) -> set[int]:
    """Top-k with ties, less the smallest whose probabilities sum to at most 1 - p."""
    threshold = sorted(row)[-k]
    candidates = [i for i in range(len(row)) if row[i] >= threshold]
    ascending = sorted(candidates, key=lambda i: row[i])
    total = sum(math.exp(row[i]) for i in ascending)
    kept, below = set(ascending), 0.0
    for i in ascending[:-1]:
        below += math.exp(row[i]) / total
        if below <= 1 - p:
            kept.discard(i)
    return kept


def test_the_filter_keeps_the_nucleus_of_the_k_largest(numerics):
    logits = torch.randn(TOKENS, 50)
    logits[0, :10] = 3.0  # ties around the k-th largest
    k = torch.tensor([5, 1, 50, 10, 3, 7], dtype=torch.int32)
    p = torch.tensor([0.95, 0.5, 0.9, 0.3, 0.99, 0.7])
    result = torch_npu.npu_top_k_top_p(logits.to("npu"), p.to("npu"), k.to("npu")).cpu()
    for row, kept, number, mass in zip(logits, result, k.tolist(), p.tolist(), strict=True):
        places = set(torch.isfinite(kept).nonzero().flatten().tolist())
        assert places == kept_places(row.double().tolist(), number, mass)
        assert all(kept[i] == row[i] for i in places)
