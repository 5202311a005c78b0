"""Attention in Triton: every row is the softmax over exactly the keys that came before it, however
its request's keys are split, and nothing that no request owns is ever let in (here: NaN).

The oracle is paged_batch's nested loops in float64; the kernels run in Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch
from paged_batch import Batch, agrees, uniform_batch

from sglang_ascend.ops.attention import tiles, triton
from sglang_ascend.ops.attention.tiles import ASCEND, ASCEND_950, H100

pytestmark = pytest.mark.usefixtures("triton_interpreter")

NAN = float("nan")
# Ragged; one short of, at and one past pages of 16 and 128 and tiles of 64.
LENGTHS = (1, 130, 17, 128, 63)
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16, 128])
QUERY_LENS = pytest.mark.parametrize("query_len", [1, 2, 4])
HEADS = pytest.mark.parametrize("num_heads", [1, 3, 16])
# heads, key heads, dim: groups of 1, 3 and 16 heads, one dim that is no power of two.
GQA_SHAPES = pytest.mark.parametrize("shape", [(2, 2, 16), (6, 2, 40), (16, 1, 32)], ids=str)
MLA_WIDTHS = (88, 32)  # nano-deepseek's latent rank and rope dim


@pytest.fixture
def split_into(monkeypatch):
    """Fixes the number of splits, which follows from the machine otherwise."""

    def fix(num_splits):
        monkeypatch.setattr(triton, "choose_num_splits", lambda *bounds: num_splits)

    return fix


@pytest.fixture
def kernels():
    from sglang_ascend.ops.attention import triton_kernels

    return triton_kernels


def mla_batch(num_heads, query_len, page_size=16, lengths=LENGTHS, widths=MLA_WIDTHS):
    shape = (num_heads, *widths)
    return uniform_batch(shape, query_len, page_size, torch.float32, True, lengths, poison=NAN)


def gqa_batch(shape, query_len, page_size=16, lengths=LENGTHS):
    return uniform_batch(shape, query_len, page_size, torch.float32, False, lengths, poison=NAN)


def mla_is_right(batch: Batch) -> bool:
    return agrees(batch.mla(name="triton"), batch.expected())


def gqa_is_right(batch: Batch) -> bool:
    return agrees(batch.gqa(name="triton"), batch.expected())


@PAGE_SIZES
@QUERY_LENS
@HEADS
def test_mla_rows_are_the_softmax_over_the_latents_before_them(
    num_heads, query_len, page_size, split_into
):
    split_into(1)
    assert mla_is_right(mla_batch(num_heads, query_len, page_size))


@PAGE_SIZES
@pytest.mark.parametrize("query_len", [1, 4])
@GQA_SHAPES
def test_gqa_rows_are_the_softmax_over_the_keys_before_them(
    shape, query_len, page_size, split_into
):
    split_into(1)
    assert gqa_is_right(gqa_batch(shape, query_len, page_size))


@PAGE_SIZES
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_the_splits_of_a_request_are_merged(num_splits, page_size, split_into):
    """Seven are more than any of these requests has tiles: empty ones contribute nothing."""
    split_into(num_splits)
    assert mla_is_right(mla_batch(1, 2, page_size, lengths=(300, 63, 2)))
    assert gqa_is_right(gqa_batch((2, 1, 16), 2, page_size, lengths=(300,)))


@pytest.mark.parametrize("page_size", [1, 128])
@pytest.mark.parametrize("edge", [64, 128, 384])
def test_lengths_around_the_edges_of_tiles_pages_and_splits(edge, page_size, split_into):
    """Two splits of a request of 128 keys meet at 64, three of 384 at 128 and at 256."""
    split_into(3 if edge == 384 else 2)
    lengths = (edge - 1, edge, edge + 1, edge + 2)
    assert mla_is_right(mla_batch(1, 1, page_size, lengths))
    assert gqa_is_right(gqa_batch((1, 1, 16), 1, page_size, lengths))


@pytest.mark.parametrize("page_size", [16, 128])
def test_the_rope_parts_may_be_tensors_of_their_own(page_size, split_into):
    """As in Ascend's pools, and in the query that SGLang's models make."""
    split_into(2)
    batch = mla_batch(3, 4, page_size)
    assert agrees(batch.mla(name="triton", apart=True), batch.expected())


@pytest.mark.slow
@PAGE_SIZES
@QUERY_LENS
@HEADS
def test_every_number_of_heads_and_rows_is_merged(num_heads, query_len, page_size, split_into):
    split_into(2)
    assert mla_is_right(mla_batch(num_heads, query_len, page_size))
    assert gqa_is_right(gqa_batch((3 * num_heads, 3, 24), query_len, page_size))


@pytest.mark.parametrize("widths", [(16, 8), (33, 70), (64, 16)], ids=str)
def test_latent_and_rope_may_have_any_width(widths):
    assert mla_is_right(mla_batch(3, 4, lengths=(40, 130), widths=widths))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [H100, ASCEND, ASCEND_950], ids=["h100", "a2-a3", "950"])
@pytest.mark.parametrize(("num_heads", "num_splits"), [(16, 3), (128, 1)])
def test_the_widths_of_deepseek_in_the_tiles_of_each_machine(
    num_heads, num_splits, machine, split_into, monkeypatch
):
    monkeypatch.setitem(tiles.MACHINES, "cpu", machine)
    split_into(num_splits)
    assert mla_is_right(mla_batch(num_heads, 4, 128, lengths=(5, 300), widths=(512, 64)))


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_the_machine_decides_the_splits_and_any_number_is_right(batch_size, monkeypatch):
    """Of four cores one request has all, two have two each and four are not split."""
    monkeypatch.setitem(tiles.MACHINES, "cpu", replace(H100, num_cores=4))
    lengths = [500 + request for request in range(batch_size)]
    assert mla_is_right(mla_batch(1, 2, lengths=lengths))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_half_precision_is_summed_in_float32(dtype, num_splits, split_into, monkeypatch):
    """The interpreter multiplies bf16 by its bits: the factors are widened here, exactly."""
    monkeypatch.setattr(triton, "operand_type", lambda _: triton_float32())
    split_into(num_splits)
    mla = uniform_batch((3, *MLA_WIDTHS), 2, 16, dtype, True, (70, 17), NAN)
    gqa = uniform_batch((3, 1, 40), 2, 16, dtype, False, (70, 17), NAN)
    outputs = mla.mla(name="triton"), gqa.gqa(name="triton")
    assert {output.dtype for output in outputs} == {dtype}
    assert agrees(outputs[0], mla.expected())
    assert agrees(outputs[1], gqa.expected())


def triton_float32():
    import triton.language as tl

    return tl.float32


def test_a_cache_in_another_dtype_is_read_in_the_query_s():
    mla = uniform_batch((3, *MLA_WIDTHS), 2, 16, torch.float16, True, (70, 17), NAN)
    gqa = uniform_batch((3, 1, 40), 2, 16, torch.float16, False, (70, 17), NAN)
    for batch in (mla, gqa):
        batch.queries = [query.float() for query in batch.queries]
    assert mla_is_right(mla)
    assert gqa_is_right(gqa)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_that_see_nothing_are_zero(num_splits, split_into):
    """The padding of a captured graph: requests of length 0 that name no page of their own."""
    split_into(num_splits)
    batch = mla_batch(3, 2, lengths=(40, 70))
    padded = Batch((3, *MLA_WIDTHS), [2] * 2, batch.kv_lens, 16, torch.float32, mla=True)
    output = triton.paged_mla(
        torch.cat([batch.query, padded.query]),
        batch.key_cache,
        torch.cat([batch.table, torch.full_like(batch.table, -1)]),
        torch.tensor([*batch.kv_lens, 0, 0], dtype=torch.int32),
        query_len=2,
        page_size=16,
        scale=batch.scale,
        kv_lora_rank=batch.rank,
    )
    assert agrees(output[:4], batch.expected())
    assert not output[4:].any()


def test_slots_may_lie_apart():
    """As the latent part of wider slots does, and one layer of a cache of several."""
    batch = mla_batch(3, 2)
    wide = torch.full((len(batch.key_cache), 1, 200), NAN)
    wide[..., :120] = batch.key_cache
    expected, batch.key_cache = batch.expected(), wide[..., :120]
    assert agrees(batch.mla(name="triton"), expected)


def test_an_empty_batch_has_an_empty_output():
    mla, gqa = mla_batch(3, 2), gqa_batch((9, 3, 40), 2)
    for batch in (mla, gqa):
        batch.queries, batch.kv_lens = [torch.empty(0, *batch.queries[0].shape[1:])], []
    assert mla.mla(name="triton", table=mla.table[:0]).shape == (0, 3, 88)
    assert gqa.gqa(name="triton", table=gqa.table[:0]).shape == (0, 9, 40)


# Broken on purpose: what the comparisons above must catch.


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("ahead", [1, -1])
def test_a_mask_off_by_one_would_be_seen(ahead, num_splits, split_into, kernels, monkeypatch):
    honest = kernels._num_visible.fn

    def off_by_one(kv_len, query, QUERY_LEN):
        return honest(kv_len + ahead, query, QUERY_LEN)

    split_into(num_splits)
    monkeypatch.setattr(kernels, "_num_visible", off_by_one)
    assert not mla_is_right(mla_batch(2, 4, lengths=(130,)))
    assert not gqa_is_right(gqa_batch((2, 1, 16), 4, lengths=(130,)))


def test_a_tile_read_to_its_end_would_let_the_poison_in(kernels, monkeypatch):
    honest = kernels._span_of_split.fn

    def whole_tiles(kv_len, split, num_splits, BLOCK_N):
        return honest((kv_len + BLOCK_N - 1) // BLOCK_N * BLOCK_N, split, num_splits, BLOCK_N)

    monkeypatch.setattr(kernels, "_span_of_split", whole_tiles)
    assert not mla_is_right(mla_batch(3, 1, 128, lengths=(40, 130)))
    assert not gqa_is_right(gqa_batch((6, 2, 16), 1, 128, lengths=(40, 130)))


@pytest.mark.parametrize("broken", ["left out", "averaged"])
def test_a_split_left_out_of_the_merge_would_be_seen(broken, split_into, monkeypatch):
    honest = triton.Splits.merged

    def merged(splits):
        if broken == "left out":
            splits.masses[..., 1] = float("-inf")
        else:
            splits.masses.clamp_(0, 0)
        return honest(splits)

    split_into(2)
    batches = mla_batch(2, 2, lengths=(190,)), gqa_batch((2, 1, 16), 2, lengths=(190,))
    assert mla_is_right(batches[0])
    assert gqa_is_right(batches[1])
    monkeypatch.setattr(triton.Splits, "merged", merged)
    assert not mla_is_right(batches[0])
    assert not gqa_is_right(batches[1])


def test_a_block_table_row_swapped_would_be_seen():
    mla, gqa = (
        mla_batch(3, 1, lengths=(40, 41, 42)),
        gqa_batch((9, 3, 40), 1, lengths=(40, 41, 42)),
    )
    assert not agrees(mla.mla(name="triton", table=mla.table[[1, 0, 2]]), mla.expected())
    assert not agrees(gqa.gqa(name="triton", table=gqa.table[[1, 0, 2]]), gqa.expected())


def test_verifying_k_rows_instead_of_k_plus_1_would_be_seen():
    mla, gqa = mla_batch(3, 4, lengths=(40, 41)), gqa_batch((9, 3, 40), 4, lengths=(40, 41))
    for batch, run in ((mla, mla.mla), (gqa, gqa.gqa)):
        expected = batch.expected().unflatten(0, (-1, 4))[:, :3].flatten(0, 1)
        batch.queries = [query[:3] for query in batch.queries]
        batch.query_lens = [3, 3]
        assert not agrees(run(name="triton"), expected)


def test_the_rope_part_left_out_would_be_seen():
    batch = mla_batch(3, 2, lengths=(40, 41))
    no_rope = batch.query.clone()
    no_rope[..., batch.rank :] = 0
    assert not agrees(batch.mla(no_rope, name="triton"), batch.expected())
