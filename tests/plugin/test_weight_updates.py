"""After a weight update nothing computes with the old weights: packed copies, the cut draft head.

The updater here writes as SGLang's does, in place and through the model's own head; the oracle is
the product in float64 with the weights that the target holds now.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.sglang

VOCAB, HIDDEN = 7, 4
DRAFT_VOCABULARY = [1, 3, 6]


class Drafting(torch.nn.Module):
    """An MTP layer's ends, as SGLang's models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = torch.nn.Module(), torch.nn.Module()
        self.set_embed_and_head(torch.empty(0), torch.empty(0))

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        for layer, weight in ((self.embed_tokens, embed), (self.lm_head, head)):
            if hasattr(layer, "weight"):
                del layer.weight
            layer.weight = weight


@pytest.fixture
def head() -> torch.nn.Parameter:
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return torch.nn.Parameter(weight, requires_grad=False)


@pytest.fixture
def drafting(head: torch.nn.Parameter):
    from sglang_ascend.plugin.weight_updates import cut_head

    model = Drafting()
    cut_head(model, torch.zeros(VOCAB, HIDDEN), head, torch.tensor(DRAFT_VOCABULARY))
    return model


def logits_are_of(model: Drafting, head: torch.Tensor) -> bool:
    from sglang_ascend.plugin.prepared_weights import apply_linear

    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ head.double()[DRAFT_VOCABULARY].T
    found = apply_linear(None, model.lm_head, x).double()
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)


def load(model: torch.nn.Module, new_head: torch.Tensor) -> tuple[bool, str]:
    """As an untied checkpoint is loaded: by the name of a parameter that holds the whole head."""
    dict(model.named_parameters())["lm_head.weight"].data.copy_(new_head)
    return True, "done"


def update(model: torch.nn.Module, new_head: torch.Tensor) -> tuple[bool, str]:
    from sglang_ascend.plugin.weight_updates import follow_weight_update

    updater = SimpleNamespace(get_model=lambda: model)
    return follow_weight_update(lambda self, weight: load(model, weight), updater, new_head)


def test_an_update_of_the_mtp_layer_loads_the_whole_head_and_cuts_it_again(drafting, head):
    assert logits_are_of(drafting, head)
    assert update(drafting, -head) == (True, "done")
    assert logits_are_of(drafting, head)


def test_an_update_of_the_target_alone_reaches_the_cut_head_that_it_shares(drafting, head):
    target = torch.nn.Module()
    target.lm_head = torch.nn.Module()
    target.lm_head.weight = head
    assert logits_are_of(drafting, head)
    update(target, head * 3)
    assert logits_are_of(drafting, head)


def test_the_rows_stay_where_a_captured_graph_reads_them(drafting, head):
    place = drafting.lm_head.weight.data_ptr()
    update(drafting, -head)
    assert drafting.lm_head.weight.data_ptr() == place


def test_a_failed_update_leaves_a_head_that_drafts(drafting, head):
    from sglang_ascend.plugin.weight_updates import follow_weight_update

    def fail(self):
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError):
        follow_weight_update(fail, SimpleNamespace(get_model=lambda: drafting))
    assert logits_are_of(drafting, head)


def test_without_the_hook_the_old_weights_stay_in_use_or_the_head_is_not_found(drafting, head):
    """The control: what the hook is for."""
    assert logits_are_of(drafting, head)
    head.data.copy_(-head)
    assert not logits_are_of(drafting, head)
    with pytest.raises(KeyError):
        load(drafting, head)


def test_every_method_that_loads_weights_is_hooked():
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from sglang_ascend.plugin.hooks import STEP_HOOKS
    from sglang_ascend.plugin.weight_updates import follow_weight_update

    hooked = {hook.target for hook in STEP_HOOKS if hook.replacement is follow_weight_update}
    loaders = {name for name in vars(WeightUpdater) if name.startswith(("update_w", "load_w"))}
    assert {target.rsplit(".", 1)[1] for target in hooked} == loaders
