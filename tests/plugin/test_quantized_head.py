"""A quantized head gives the logits of its decoded rows: whole, split between ranks, or cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.quantization.formats import INT8
from sglang_ascend.quantization.rows import to_rows
from sglang_ascend.quantization.weight import QuantizedWeight

VOCABULARY, WIDTH = 11, 12


@pytest.fixture
def weight() -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (VOCABULARY, WIDTH), generator=generator).to(torch.int8)
    scale = torch.rand(VOCABULARY, 1, generator=generator) + 0.5
    return QuantizedWeight(codes, scale, None, (1, WIDTH), INT8)


def head_of(weight: QuantizedWeight | None, start: int, stop: int, padded: int):
    """What a rank makes of the head whose rows start..stop are its own, of ``padded`` in all."""
    from sglang_ascend.plugin.quantization.head import QuantizedHead

    head = QuantizedHead("lm_head")
    head.dtype = torch.float32
    if weight is not None:
        head.collect(torch.nn.Parameter(torch.empty(0)), to_rows(weight))
    head.process_weights_after_loading(layer_of(start, stop, padded))
    return head


def layer_of(start: int, stop: int, padded: int) -> SimpleNamespace:
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
    sizes = {"shard_indices": indices, "num_embeddings_per_partition": padded}
    return SimpleNamespace(weight=torch.empty(0), **sizes)


def logits(head, hidden: torch.Tensor) -> torch.Tensor:
    return head.apply(torch.nn.Module(), hidden)


def test_ranks_have_their_rows_and_padding_behind_them(weight):
    hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = hidden @ weight.dequantize().T
    slices = [logits(head_of(weight, start, stop, 6), hidden) for start, stop in ((0, 6), (6, 11))]
    joined = torch.cat(slices, dim=1)
    assert joined.shape == (3, 12)
    assert_close(joined[:, :VOCABULARY], expected, rtol=1e-5, atol=1e-4)
    # The control: a rank that begins a row late.
    late = logits(head_of(weight, 1, 7, 6), hidden)
    assert not torch.allclose(late, expected[:, :6], rtol=1e-5, atol=1e-4)


def test_a_draft_vocabulary_has_its_own_rows_and_scales(weight):
    token_ids = torch.tensor([1, 4, 10])
    hidden = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2))
    cut = head_of(weight, 0, VOCABULARY, VOCABULARY).cut(token_ids)
    expected = hidden @ weight.dequantize()[token_ids].T
    assert_close(logits(cut, hidden), expected, rtol=1e-5, atol=1e-4)


def test_a_device_holds_the_product_alone(weight, monkeypatch):
    """The rows that heads are cut out of stay on the host."""
    from sglang_ascend.plugin.quantization import head as module

    prepared = []
    monkeypatch.setattr(module, "prepare", lambda weight, *_, **__: prepared.append(weight))
    head, layer = module.QuantizedHead("lm_head"), layer_of(0, VOCABULARY, VOCABULARY)
    layer.weight, head.dtype = layer.weight.to("meta"), torch.float32
    head.collect(torch.nn.Parameter(torch.empty(0)), to_rows(weight))
    head.process_weights_after_loading(layer)
    token_ids = torch.tensor([1, 4, 10])
    cut = head.cut(token_ids)
    assert [(one.shape[0], one.codes.device.type) for one in prepared] == [
        (11, "meta"),
        (3, "meta"),
    ]
    assert_close(head.rows(token_ids), weight.dequantize()[token_ids])
    assert_close(cut.rows(torch.arange(3)), weight.dequantize()[token_ids])


def test_an_update_may_bring_a_float_head(weight):
    head = head_of(weight, 0, VOCABULARY, VOCABULARY)
    floats = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(3))
    hidden = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(4))
    head.collect(torch.nn.Parameter(torch.empty(0)), floats)
    head.process_weights_after_loading(layer_of(0, VOCABULARY, VOCABULARY))
    assert_close(logits(head, hidden), hidden @ floats.T)
    token_ids = torch.tensor([2, 3])
    assert_close(logits(head.cut(token_ids), hidden), hidden @ floats[token_ids].T)


def test_a_head_without_its_tensor_stops_the_start():
    with pytest.raises(ValueError, match="lm_head got no weight"):
        head_of(None, 0, VOCABULARY, VOCABULARY)
