"""Top-k, then top-p of what it left, keeps exactly the tokens that sorting would, ties included; a
row that no token can be drawn from is an error.

The oracle sorts a row in float64, ascending, as npu_top_k_top_p words it. A row may differ from it
only where a share lies within 1e-6 of 1 - p, as summation order decides there; such rows are few.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_tokens import NO_TOP_K, differences, kept_by_sorting, random_rows, rule_of, tokens_kept

from sglang_ascend.ops import sampling
from sglang_ascend.ops.sampling.threshold import Kept

pytestmark = pytest.mark.usefixtures("triton_interpreter")

VOCAB_SIZE = 129280  # DeepSeek-V3's
ON_HOST = ["reference", "numba"]


GRID = [(1, 2000), (2, 20000), (3, 20000), (8, 20000), (40, 20000), (64, 10000), (65, 10000)]
GRID += [(200, 2000), (4500, 60)]


JOINT = pytest.mark.parametrize("joint", [False, True], ids=["in turn", "joint"])


@JOINT
@pytest.mark.parametrize("body", ON_HOST)
def test_a_hundred_thousand_rows_keep_what_sorting_keeps(body, joint):
    assert sum(num_rows for _, num_rows in GRID) > 100_000
    found = [
        differences(
            rule_of(body, joint), *random_rows(num_rows, vocab_size, seed=vocab_size), joint
        )
        for vocab_size, num_rows in GRID
    ]
    wrong, excused = np.sum(found, axis=0)
    assert wrong == 0
    assert excused < 5


@JOINT
@pytest.mark.parametrize("body", ON_HOST)
def test_rows_of_a_whole_vocabulary(body, joint):
    rows = random_rows(24, VOCAB_SIZE, seed=0)
    wrong, excused = differences(rule_of(body, joint), *rows, joint)
    assert wrong == 0
    assert excused < 3


@pytest.mark.parametrize("body", ON_HOST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_judged_by_its_value(body, dtype):
    assert differences(rule_of(body), *random_rows(500, 300, seed=1, dtype=dtype)) == (0, 0)


ROW = st.lists(
    st.one_of(st.integers(-40, 40).map(lambda x: x / 8), st.just(-np.inf), st.just(-0.0)),
    min_size=1,
    max_size=12,
).filter(lambda row: max(row) > -np.inf)


@JOINT
@pytest.mark.parametrize("body", ON_HOST)
@given(row=ROW, top_k=st.integers(1, 14), top_p=st.floats(0, 1, width=32))
def test_small_rows_with_ties(body, joint, row, top_k, top_p):
    parameters = torch.tensor([row]), torch.tensor([top_k]), torch.tensor([top_p])
    wrong, _ = differences(rule_of(body, joint), *parameters, joint)
    assert wrong == 0


def strictly_above(logits, top_ks, top_ps):
    """Broken: the token at the threshold is dropped."""
    kept = sampling.top_k_top_p.implementation("reference")(logits, top_ks, top_ps)
    return (logits > kept.threshold[:, None]).numpy()


def no_more_than_k(logits, top_ks, top_ps):
    """Broken: of tokens equal to the k-th only the first stay."""
    kept = torch.from_numpy(kept_by_sorting(logits.numpy(), top_ks.numpy(), top_ps.numpy()))
    ranks = logits.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (kept & (ranks < top_ks[:, None])).numpy()


def share_of_the_whole_row(logits, top_ks, top_ps):
    """Broken unless it is asked for: top-p before top-k takes effect."""
    top_k = kept_by_sorting(logits.numpy(), top_ks.numpy(), np.ones(len(logits)))
    top_p = kept_by_sorting(logits.numpy(), np.full(len(logits), NO_TOP_K), top_ps.numpy())
    return top_k & top_p


def up_to_the_crossing(logits, top_ks, top_ps):
    """Broken: the token that reaches top_p is dropped."""
    kept = kept_by_sorting(logits.numpy(), top_ks.numpy(), top_ps.numpy())
    lowest = np.where(kept, logits.numpy(), np.inf).min(axis=1, keepdims=True)
    highest = logits.numpy().max(axis=1, keepdims=True)
    crossed = (top_ps < 1).numpy()[:, None] & (logits.numpy() == lowest) & (lowest < highest)
    return kept & ~crossed


@pytest.mark.parametrize(
    "rule", [strictly_above, no_more_than_k, share_of_the_whole_row, up_to_the_crossing]
)
def test_a_rule_that_is_off_by_one_token_is_caught(rule):
    wrong, _ = differences(rule, *random_rows(1000, 40, seed=6))
    assert wrong > 20


def test_one_filter_after_the_other_is_caught_where_both_are_of_the_row():
    rows = random_rows(1000, 40, seed=6)
    assert differences(share_of_the_whole_row, *rows, joint=True) == (0, 0)
    wrong, _ = differences(rule_of("reference"), *rows, joint=True)
    assert wrong > 20


INVALID = {
    "a NaN": [0.0, np.nan, 1.0],
    "a NaN with a sign": [0.0, -np.nan, 1.0],
    "an infinity": [0.0, np.inf, 1.0],
    "nothing finite": [-np.inf] * 3,
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, under the interpreter
@pytest.mark.parametrize("body", [*ON_HOST, "triton"])
@pytest.mark.parametrize("row", INVALID.values(), ids=INVALID)
def test_a_row_that_nothing_can_be_drawn_from_is_an_error(body, row):
    logits = torch.tensor([[0.0, 1.0, -np.inf], row, [5.0, 1.0, 2.0]])
    parameters = torch.tensor([1, 2, 3]), torch.tensor([0.5, 0.9, 1.0])
    with pytest.raises(ValueError, match=r"logits rows \[1\] \(1 of 3\) hold a NaN, a \+inf or"):
        sampling.top_k_top_p.implementation(body)(logits, *parameters)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, under the interpreter
@pytest.mark.parametrize("body", [*ON_HOST, "triton"])
def test_on_a_device_an_invalid_row_says_so_later_and_leaves_the_others_alone(body, monkeypatch):
    """Elsewhere than on CPU nothing raises by itself, for that would wait for the device."""
    monkeypatch.setattr(Kept, "checked_on_host", lambda kept: kept)
    logits = torch.tensor([[0.0, 1.0, -np.inf], *INVALID.values(), [5.0, 1.0, 2.0]])
    top_ks, top_ps = torch.full((6,), 2), torch.full((6,), 0.9)
    kept = sampling.top_k_top_p.implementation(body)(logits, top_ks, top_ps)
    assert kept.mass.isnan().tolist() == [False, True, True, True, True, False]
    assert kept.threshold[kept.mass.isnan()].isnan().all()
    assert tokens_kept(logits, kept)[[0, 5]].tolist() == [[True, True, False], [True, False, False]]
    with pytest.raises(ValueError, match=r"logits rows \[1, 2, 3, 4\] \(4 of 6\)"):
        kept.check()


def test_the_definition_does_not_wait_for_the_device():
    """A meta tensor has no values to wait for."""
    rows = torch.empty(4, device="meta")
    logits = torch.empty(4, 300, device="meta")
    kept = sampling.top_k_top_p(logits, rows.long(), rows)
    assert kept.threshold.shape == (4,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        kept.check()
