"""The latent kernels of Ascend against nested loops in float64, in Triton's interpreter: sums near
memory in four parts, and sums in memory at which blocks of rows take turns (here blocks of 16)."""

from dataclasses import replace

import pytest
import torch
from paged_batch import agrees, uniform_batch

from sglang_ascend.ops.attention import tiles, triton
from sglang_ascend.ops.attention.tiles import ASCEND

pytestmark = pytest.mark.usefixtures("triton_interpreter")

NAN = float("nan")
# Ragged; a page of 128, fewer keys than queries, three tiles of which the last is a part.
LENGTHS = (128, 1, 270)
KERNELS = {
    "in parts": ASCEND,
    "in memory": replace(ASCEND, near_rows=0, max_block_m=16),
}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """The kernel that serves."""
    monkeypatch.setitem(tiles.MACHINES, "cpu", KERNELS[request.param])
    return request.param


@pytest.fixture
def split_into(monkeypatch):
    return lambda splits: monkeypatch.setattr(triton, "choose_num_splits", lambda *_: splits)


def batch_of(num_heads, query_len, page_size=128, lengths=LENGTHS, widths=(88, 32)):
    shape = (num_heads, *widths)
    return uniform_batch(shape, query_len, page_size, torch.float32, True, lengths, poison=NAN)


def is_right(batch, **keywords) -> bool:
    return agrees(batch.mla(name="triton", **keywords), batch.expected())


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(("num_heads", "query_len"), [(1, 1), (3, 4), (20, 4)])
def test_rows_are_the_softmax_over_the_latents_before_them(
    num_heads, query_len, num_splits, kernel, split_into
):
    """20 heads are five blocks of 16 rows: programs of three and two, the last block a part."""
    split_into(num_splits)
    assert is_right(batch_of(num_heads, query_len))


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_pages_may_be_other_than_a_tile(page_size, kernel, split_into):
    split_into(2)
    assert is_right(batch_of(9, 4, page_size, lengths=(150, 33)))


@pytest.mark.parametrize("widths", [(16, 8), (33, 70), (64, 16)], ids=str)
def test_latent_and_rope_may_have_any_width(widths, kernel):
    assert is_right(batch_of(6, 4, lengths=(40, 260), widths=widths))


def test_the_rope_parts_may_be_tensors_of_their_own(kernel):
    assert is_right(batch_of(6, 4), apart=True)


def test_a_row_that_sees_no_key_is_zero(kernel):
    """As in the padding of a captured graph: kv_len 0."""
    batch = batch_of(6, 4, lengths=(40, 300))
    expected = batch.expected()
    batch.kv_lens = [batch.kv_lens[0], 0]
    output = batch.mla(name="triton")
    assert agrees(output[:4], expected[:4])
    assert not output[4:].any()


# Broken on purpose: what the comparisons above must catch.


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("in parts", "_scores"),
        ("in parts", "_num_visible"),
        ("in memory", "_scores"),
        ("in memory", "_num_visible"),
        ("in memory", "_mass_with"),
        ("in memory", "_add_part"),
    ],
    indirect=["kernel"],
)
def test_a_kernel_that_is_off_would_be_seen(name, kernel, split_into, monkeypatch):
    """One split has three tiles: the sums of the first are there to be rescaled."""
    from sglang_ascend.ops.attention import triton_latent_kernels, triton_memory_kernels

    kernels = {"in parts": triton_latent_kernels, "in memory": triton_memory_kernels}[kernel]
    honest = getattr(triton_memory_kernels, name).fn

    def no_rope(*operands):
        return honest(*operands[:-1], operands[-1] * 0.0)

    def one_ahead(kv_len, query, QUERY_LEN):
        return honest(kv_len + 1, query, QUERY_LEN)

    def forgets(mass, scores):
        return honest(mass * 0.0 + float("-inf"), scores)

    def not_rescaled(sums, weights, values, factor, *others):
        return honest(sums, weights, values, factor * 0.0 + 1.0, *others)

    broken = {
        "_scores": no_rope,
        "_num_visible": one_ahead,
        "_mass_with": forgets,
        "_add_part": not_rescaled,
    }
    split_into(1)
    batch = batch_of(6, 4, lengths=(300,))
    assert is_right(batch)
    monkeypatch.setattr(kernels, name, broken[name])
    assert not is_right(batch)
