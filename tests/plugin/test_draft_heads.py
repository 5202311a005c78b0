"""A row of a batch gets logits of its language's tokens and of its own text's at the target's ids,
-inf elsewhere: float and quantized, against products in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.plugin.requests.draft_heads.lists import DraftTokens
from sglang_ascend.quantization.formats import INT8
from sglang_ascend.quantization.weight import QuantizedWeight
from sglang_ascend.speculative.vocabulary.file import DraftVocabulary, Language

Context = Sequence[tuple[int, int]]  # (row of the batch, token)

VOCAB_SIZE, WIDTH, NONE = 11, 12, 2
LISTS = [[1, 4, 10], [0, 4, 5, 6]]


@pytest.fixture(params=["float", "int8"])
def head(request):
    """(the target's head, its rows in float64)."""
    from sglang_ascend.plugin.cpu.layers import PreparedHead
    from sglang_ascend.plugin.quantization.head import QuantizedHead

    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    if request.param == "float":
        weight = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
        module.weight, module.quant_method = torch.nn.Parameter(weight), PreparedHead()
        return module, weight.double()
    codes = torch.randint(-127, 128, (VOCAB_SIZE, WIDTH), generator=generator).to(torch.int8)
    scale = torch.rand(VOCAB_SIZE, 1, generator=generator) + 0.5
    quantized = QuantizedWeight(codes, scale, None, (1, WIDTH), INT8)
    module.quant_method = QuantizedHead("lm_head")
    module.quant_method.dtype, module.quant_method.device = torch.float32, codes.device
    module.quant_method._serve(quantized)
    return module, quantized.dequantize().double()


class Lists(SimpleNamespace):
    """Those that a test says, in place of what is tracked."""

    def say(self, places: list[int], context: Context = ()) -> None:
        of = torch.tensor(places)
        rows_of = {place: (of == place).nonzero()[:, 0] for place in set(places)}
        own = (torch.tensor([pair[i] for pair in context], dtype=torch.int64) for i in (0, 1))
        self.batch = DraftTokens(len(places), rows_of, *own)


@pytest.fixture
def heads(head):
    from sglang_ascend.plugin.requests.draft_heads.lists import ListedHeads

    listed = [Language("", torch.tensor(ids), torch.ones(len(ids))) for ids in LISTS]
    scripts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    vocabulary = DraftVocabulary(torch.tensor([0]), tuple(listed), scripts)
    heads = ListedHeads(Lists(), vocabulary, VOCAB_SIZE, head[0])
    heads.give_rows(SimpleNamespace(lm_head=SimpleNamespace()))
    return heads


def expected_logits(
    rows: torch.Tensor, x: torch.Tensor, places: list[int], context: Context = ()
) -> torch.Tensor:
    logits = x.double() @ rows.T
    for row, place in enumerate(places):
        if place != NONE:
            own = [token for other, token in context if other == row]
            absent = [i for i in range(VOCAB_SIZE) if i not in (*LISTS[place], *own)]
            logits[row, absent] = -torch.inf
    return logits


@pytest.mark.parametrize(
    "places", [[0], [1, 1, 1], [NONE, NONE], [0, 1, 0, 1], [1, NONE, 0, NONE, 1]]
)
def test_a_row_has_the_logits_of_its_language(heads, head, places):
    x = torch.randn(len(places), WIDTH, generator=torch.Generator().manual_seed(1))
    heads.lists.say(places)
    found = heads.apply(torch.nn.Module(), x)
    expected = expected_logits(head[1], x, places).float()
    assert_close(found, expected, rtol=1e-4, atol=1e-3)
    # The control: another row's language.
    others = [(place + 1) % 3 for place in places]
    assert not torch.equal(found.isinf(), expected_logits(head[1], x, others).isinf())


@pytest.mark.parametrize("places", [[0, 0, 0], [1, NONE, 0], [1, 0, 1]])
def test_a_row_has_the_logits_of_its_own_text(heads, head, places):
    """A token twice, one that the list has, one of another row's; and a row without any."""
    context = [(0, 2), (0, 9), (0, 2), (2, 4), (2, 7), (2, 8)]
    x = torch.randn(len(places), WIDTH, generator=torch.Generator().manual_seed(3))
    heads.lists.say(places, context)
    for scale in (1, 2):  # two drafts of one chain
        expected = expected_logits(head[1], scale * x, places, context).float()
        assert_close(heads.apply(torch.nn.Module(), scale * x), expected, rtol=1e-4, atol=1e-3)
    # The next batch, of as many requests: nothing of this one is left.
    others = [(0, 3), (1, 2)]
    heads.lists.say(places, others)
    expected = expected_logits(head[1], x, places, others).float()
    assert_close(heads.apply(torch.nn.Module(), x), expected, rtol=1e-4, atol=1e-3)


def test_rows_of_no_known_batch_have_the_whole_head(heads, head):
    heads.lists.say([0, 1])
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
    expected = (x.double() @ head[1].T).float()
    assert_close(heads.apply(torch.nn.Module(), x), expected, rtol=1e-4, atol=1e-3)


def test_one_product_for_each_language_of_a_batch(heads):
    calls: list[int] = []
    heads.products = [
        lambda x, product=product, ids=ids: calls.append(len(x)) or product(x)
        for product, ids in zip(heads.products, LISTS, strict=True)
    ]
    heads.lists.say([0, 1, 0, 0, 1])
    heads.apply(torch.nn.Module(), torch.randn(5, WIDTH))
    assert sorted(calls) == [2, 3]


def test_heads_follow_an_update_of_the_weights(heads, head):
    """An update may bring a float head, also where the former one was quantized."""
    method, new = head[0].quant_method, torch.randn(VOCAB_SIZE, WIDTH)
    if hasattr(method, "_serve"):
        method._serve(new)
    else:
        head[0].weight.data.copy_(new)
    heads.give_rows(SimpleNamespace(lm_head=SimpleNamespace()))
    heads.lists.say([0, 1])
    x = torch.randn(2, WIDTH)
    expected = expected_logits(new.double(), x, [0, 1]).float()
    assert_close(heads.apply(torch.nn.Module(), x), expected, rtol=1e-4, atol=1e-3)
