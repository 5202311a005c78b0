"""What is changed of SGLang's Ernie 4.5, which is written for other devices, changes no result."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("given", [False, True])
def test_a_forward_that_can_be_captured_masks_position_0_as_sglang_does(loaded_plugins, given):
    from sglang.srt.models.ernie4_eagle import Ernie4ModelMTP

    from sglang_ascend.plugin.npu.models import ernie_mtp_forward

    torch.manual_seed(0)
    table, positions = torch.randn(9, 4), torch.tensor([0, 1, 2, 0, 5])
    layer = SimpleNamespace(
        embed_tokens=lambda ids: table[ids].clone(),
        mtp_emb_norm=torch.cos,
        mtp_hidden_norm=torch.sin,
        mtp_linear_proj=lambda both: both.cumsum(-1),
        mtp_block=lambda positions, hidden_states, forward_batch, residual: (
            hidden_states + positions[:, None],
            hidden_states.exp(),
        ),
    )
    batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=torch.randn(5, 4)))
    ids = torch.tensor([1, 3, 5, 7, 8])

    def run(forward: Any, positions: torch.Tensor) -> torch.Tensor:
        embeds = table[ids] * 2 if given else None
        return forward(layer, ids, positions, batch, embeds)

    theirs = inspect.unwrap(Ernie4ModelMTP.forward)
    expected = run(theirs, positions)
    assert torch.equal(run(ernie_mtp_forward, positions), expected)
    assert not torch.equal(run(ernie_mtp_forward, positions + 1), expected)


def test_a_router_bias_of_one_row_is_added_to_every_row(loaded_plugins):
    from sglang.srt.layers.moe.topk import TopK, TopKConfig, fused_topk_torch_native

    from sglang_ascend.plugin.cpu.experts import flatten_router_biases

    torch.manual_seed(0)
    bias = nn.Parameter(torch.randn(1, 6), requires_grad=False)
    topk = TopK.__new__(TopK)  # its constructor asks for a server's configuration
    nn.Module.__init__(topk)
    topk.topk_config = TopKConfig(top_k=2, correction_bias=bias)
    flatten_router_biases(nn.ModuleList([topk]))
    bias.data.copy_(torch.randn(1, 6))  # as an update of weights does
    logits = torch.randn(5, 6)

    def choose(bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_topk_torch_native(logits, logits, 2, True, bias, "softmax")

    with pytest.raises(RuntimeError):  # the control: as SGLang's model leaves it
        choose(bias)
    found, ids = choose(topk.topk_config.correction_bias)
    scores = logits.double().softmax(-1)
    wanted = (scores + bias.double()).topk(2, sorted=False).indices
    assert torch.equal(ids.sort().values, wanted.sort().values)
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(found.double(), chosen / chosen.sum(-1, keepdim=True))
    assert not torch.equal(wanted.sort().values, scores.topk(2).indices.sort().values)


def test_an_mtp_layer_whose_head_is_its_embedding_gets_a_head_of_its_own(loaded_plugins):
    from sglang_ascend.plugin.requests.weight_updates import (
        separate_head,
        share_embedding_and_head,
    )

    embedding, head = (nn.Parameter(torch.randn(rows, 4)) for rows in (9, 3))

    def shared(separate: bool) -> nn.Module:
        model = nn.Module()
        model.model = nn.Module()
        model.model.embed_tokens = model.lm_head = nn.Embedding(9, 4)
        if separate:
            separate_head(model)
        share_embedding_and_head(model, embedding, head)
        return model

    model = shared(separate=True)
    assert model.model.embed_tokens.weight is embedding and model.lm_head.weight is head
    assert model.model.embed_tokens(torch.tensor([8])).shape == (1, 4)
    assert shared(separate=False).model.embed_tokens.weight is head  # the control
