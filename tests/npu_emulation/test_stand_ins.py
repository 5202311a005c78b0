"""What stands in for kernels that no registry has computes what loops say, when its turn comes.

Each launch is recorded by its name and queued like torch_npu's; the documentation lists them all.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npu_emulation import stand_ins
from npu_emulation.counters import num_pending
from npu_emulation.stand_ins import allocation, norms, speculation, triton_launches
from sglang_ascend.ops.attention.triton import paged_mla

DOCUMENTATION = Path(__file__).parents[2] / "docs/ascend-emulation.md"
PAGE = 128


@pytest.fixture(scope="module", autouse=True)
def installed():
    stand_ins.install()


def on_npu(*values, dtype=torch.int64) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=dtype, device="npu") for value in values]


def test_the_documentation_lists_every_stand_in():
    rows = [f"| {' | '.join(row)} |" for row in stand_ins.STAND_INS]
    text = DOCUMENTATION.read_text()
    assert [row for row in rows if row not in text] == []


def test_a_kernel_without_a_stand_in_is_imported_and_raises_by_its_name():
    from sgl_kernel_npu.sample.top_p_renorm_prob import top_p_renorm_prob

    with pytest.raises(NotImplementedError, match="top_p_renorm_prob has no stand-in"):
        top_p_renorm_prob(torch.zeros(1))


def check_allocation(free_pages: list[int]) -> None:
    """A fresh prompt, one that fills a page it has begun, one that begins the next page."""
    prefixes, lengths, last = (
        [0, 100, 2 * PAGE],
        [130, 140, 2 * PAGE + 1],
        [-1, 6 * PAGE + 99, 10 * PAGE - 1],
    )
    num_new = sum(lengths) - sum(prefixes)
    out = torch.empty(num_new, dtype=torch.int64, device="npu")
    arguments = on_npu(prefixes, lengths, last, free_pages)
    allocation.alloc_extend_kernel(*arguments, out, 4, PAGE, 256)
    pages = {(0, 0): 40, (0, 1): 7, (1, 0): 6, (1, 1): 23, (2, 2): 11}
    wanted = [
        pages[request, position // PAGE] * PAGE + position % PAGE
        for request in range(3)
        for position in range(prefixes[request], lengths[request])
    ]
    assert out.tolist() == wanted


def test_new_tokens_fill_the_last_page_and_take_free_ones_in_order():
    check_allocation([40, 7, 23, 11, 99])


def test_pages_in_another_order_are_caught():
    with pytest.raises(AssertionError):
        check_allocation([7, 40, 23, 11, 99])


def test_locations_of_new_rows_are_those_of_each_request_s_places(numerics):
    table = torch.randperm(5 * 50).view(5, 50)
    rows, starts, ends = [3, 0, 4], [10, 0, 48], [13, 1, 50]
    out = torch.zeros(8, dtype=torch.int32, device="npu")
    torch.ops.npu.cache_loc_update(
        *on_npu(rows), table.int().to("npu"), *on_npu(starts), *on_npu(ends), out
    )
    kept = [
        int(table[r, i]) for r, s, e in zip(rows, starts, ends, strict=True) for i in range(s, e)
    ]
    assert out.tolist() == [*kept, 0, 0]


def test_two_norms_of_three_parts_wait_for_their_turn():
    x, q_gamma, kv_gamma = torch.randn(5, 6 + 8 + 4), torch.randn(6), torch.randn(8)
    q_norm, kv_norm = (SimpleNamespace(weight=gamma.to("npu")) for gamma in (q_gamma, kv_gamma))
    on_device = x.to("npu")
    torch.npu.synchronize()
    before = len(stand_ins.launched)
    results = norms.fused_split_qk_norm(on_device, q_norm, kv_norm, 6, 8, 4, eps=1e-6)
    assert num_pending() == 1
    assert stand_ins.launched[before:] == ["fused_split_qk_norm"]
    wanted = []
    for part, gamma in ((x[:, :6], q_gamma), (x[:, 6:14], kv_gamma)):
        root = (part.double().pow(2).sum(-1, keepdim=True) / part.shape[-1] + 1e-6).sqrt()
        wanted.append((part.double() / root * gamma.double()).float())
    torch.testing.assert_close(results[0].cpu(), wanted[0])
    torch.testing.assert_close(results[1].cpu(), wanted[1].unsqueeze(1))
    assert torch.equal(results[2].cpu(), x[:, None, 14:])


def test_a_grammar_s_bits_leave_what_xgrammar_leaves(numerics):
    import xgrammar

    logits = torch.randn(3, 70)
    bits = torch.randint(-(2**31), 2**31, (3, 3)).int()
    on_device = logits.to("npu")
    torch.ops.npu.apply_token_bitmask(on_device, bits.to("npu"))
    xgrammar.apply_token_bitmask_inplace(logits, bits, backend="cpu")
    assert 0 < logits.isinf().sum() < logits.numel()
    assert torch.equal(on_device.cpu(), logits)


ROWS, CHAINS = 4, 3  # three drafted tokens after the last accepted one
LINKS = {
    "retrive_index": torch.arange(CHAINS * ROWS).view(CHAINS, ROWS),
    "retrive_next_token": torch.tensor([1, 2, 3, -1]).expand(CHAINS, ROWS),
    "retrive_next_sibling": torch.full((CHAINS, ROWS), -1),
}


def test_drafts_of_one_branch_become_a_chain(numerics):
    import sglang.kernels.ops.speculative.spec_tree  # noqa: F401  (not as the device's work)

    lengths = [5, 9, 2]
    mask = torch.ones(sum((n + ROWS) * ROWS for n in lengths), dtype=torch.bool, device="npu")
    positions = torch.zeros(CHAINS * ROWS, dtype=torch.int64, device="npu")
    links = [torch.full((CHAINS, ROWS), -1, device="npu") for _ in LINKS]
    parents, chosen = [[-1, 0, 1]] * CHAINS, [[0, 1, 2]] * CHAINS
    torch.ops.npu.build_tree_kernel_efficient(
        *on_npu(parents, chosen, lengths), mask, positions, *links, 1, ROWS - 1, ROWS, 0
    )
    assert positions.tolist() == [n + row for n in lengths for row in range(ROWS)]
    for link, wanted in zip(links, LINKS.values(), strict=True):
        assert torch.equal(link.cpu(), wanted)
    visible = [
        n * [True] + [key <= row for key in range(ROWS)] for n in lengths for row in range(ROWS)
    ]
    assert mask.tolist() == [value for row in visible for value in row]


def check_chains(candidates: list[list[int]], targets: list[list[int]]) -> None:
    predicts = torch.zeros(CHAINS * ROWS, dtype=torch.int32, device="npu")
    accepted = torch.full((CHAINS, ROWS), -1, dtype=torch.int32, device="npu")
    counts = torch.empty(CHAINS, dtype=torch.int32, device="npu")
    speculation.verify_tree_greedy(
        predicts,
        accepted,
        counts,
        candidates=on_npu(candidates)[0],
        **{name: link.contiguous().to("npu") for name, link in LINKS.items()},
        target_predict=on_npu(targets)[0],
    )
    for chain, (drafts, target) in enumerate(zip(candidates, targets, strict=True)):
        kept = 0
        while kept < ROWS - 1 and drafts[kept + 1] == target[kept]:
            kept += 1
        assert int(counts[chain]) == kept
        rows = [chain * ROWS + row for row in range(kept + 1)]
        assert accepted[chain].tolist() == rows + [-1] * (ROWS - 1 - kept)
        assert predicts[rows[0] : rows[-1] + 1].tolist() == target[: kept + 1]


def test_a_chain_keeps_the_drafts_that_the_target_repeats(numerics):
    """All, none, and the first only though a later one matches again."""
    candidates = [[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]]
    check_chains(candidates, [[1, 2, 3, 4], [5, 2, 3, 4], [1, 7, 3, 4]])


def test_a_kernel_of_triton_waits_for_its_turn_and_is_replayed_with_its_graph(numerics):
    import triton
    import triton.language as tl

    @triton.jit
    def add_one(pointer, num_values: tl.constexpr):
        places = pointer + tl.arange(0, num_values)
        tl.store(places, tl.load(places) + 1)

    x = torch.zeros(4, dtype=torch.int32, device="npu")
    torch.npu.synchronize()
    before = len(stand_ins.launched)
    add_one[(1,)](x, 4)
    assert num_pending() == 1
    assert stand_ins.launched[before:] == ["triton:add_one"]
    assert x.tolist() == [1] * 4
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        add_one[(1,)](x, 4)
    assert x.tolist() == [1] * 4
    for replays in (1, 2):
        graph.replay()
        assert x.tolist() == [1 + replays] * 4
    assert len(stand_ins.launched) == before + 2


def latent_attention(kv_lens: list[int]) -> torch.Tensor:
    """Of three requests of up to two pages, with four rows each."""
    torch.manual_seed(0)
    rank, rope, heads, query_len = 64, 16, 4, 4
    query = torch.randn(len(kv_lens) * query_len, heads, rank + rope)
    cache = torch.randn(8 * PAGE, 1, rank + rope)
    block_table = torch.tensor([[5, 2], [1, 7], [3, 0]], dtype=torch.int32)
    operands = (query, cache, block_table, torch.tensor(kv_lens, dtype=torch.int32))
    return paged_mla(
        *(operand.to("npu") for operand in operands),
        query_len=query_len,
        page_size=PAGE,
        scale=0.2,
        kv_lora_rank=rank,
    ).cpu()


def test_latent_attention_is_the_same_whole_and_interpreted(monkeypatch):
    """Of keys on two pages, of as many keys as rows, and of none, as in a graph's padding."""
    before = len(stand_ins.launched)
    whole = latent_attention([200, 4, 0])
    assert stand_ins.launched[before:] == ["triton:mla_in_parts", "triton:merge_splits"]
    assert whole[:8].all() and not whole[8:].any()
    assert not torch.allclose(whole, latent_attention([199, 4, 0]))
    monkeypatch.setenv("NPU_EMULATION_INTERPRET_MLA", "1")
    torch.testing.assert_close(latent_attention([200, 4, 0]), whole)


def merged_by_loop(outputs, masses, num_kv_heads, query_len, group):
    """In float64; a row that no split has seen a key of is 0."""
    num_queries = len(outputs) // num_kv_heads // group
    found = torch.zeros(num_queries, num_kv_heads * group, outputs.shape[-1], dtype=torch.float64)
    for row, (parts, weights) in enumerate(
        zip(outputs.double(), masses.double().exp(), strict=True)
    ):
        stream, query, head = row // group // query_len, row // group % query_len, row % group
        request, kv_head = stream // num_kv_heads, stream % num_kv_heads
        seen = weights > 0
        if seen.any():
            value = (parts[seen] * weights[seen, None]).sum(0) / weights.sum()
            found[request * query_len + query, kv_head * group + head] = value
    return found


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_splits_are_merged_by_their_masses_and_in_the_order_of_queries(num_kv_heads):
    query_len, group, width = 3, 2, 16
    rows = 2 * num_kv_heads * query_len * group
    outputs, masses = torch.randn(rows, 3, width), torch.randn(rows, 3)
    masses[::2, 1], masses[::3] = float("-inf"), float("-inf")
    outputs[masses.isinf()] = float("nan")
    merged = torch.empty(2 * query_len, num_kv_heads * group, width)
    sizes = {"QUERY_LEN": query_len, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "WIDTH": width}
    triton_launches.merge_splits(outputs, masses, merged, 3, **sizes)
    wanted = merged_by_loop(outputs, masses, num_kv_heads, query_len, group)
    torch.testing.assert_close(merged.double(), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        other = merged_by_loop(outputs, masses, num_kv_heads, group, query_len)
        torch.testing.assert_close(merged.double(), other, rtol=1e-5, atol=1e-6)
