"""After a weight update nothing computes with the old weights: packed copies, the cut draft head.

The updater here writes as SGLang's does, in place and through the model's own head; the oracle is
the product in float64 with the weights that the target holds now.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from products import is_product

pytestmark = pytest.mark.sglang

VOCAB, HIDDEN = 7, 4
DRAFT_VOCABULARY = [1, 3, 6]


class Drafting(torch.nn.Module):
    """An MTP layer's ends, as SGLang's models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens, self.lm_head = torch.nn.Module(), torch.nn.Module()
        for layer in (self.model.embed_tokens, self.lm_head):
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


@pytest.fixture(autouse=True)
def weights_of_this_process(monkeypatch):
    """SGLang refuses an update of weights that processes share, and asks its configuration."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    settings = SimpleNamespace(weight_cache_mode="off")
    monkeypatch.setattr(weight_updater, "get_model", lambda: settings)


@pytest.fixture
def head() -> torch.nn.Parameter:
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return torch.nn.Parameter(weight, requires_grad=False)


@pytest.fixture
def drafting(head: torch.nn.Parameter):
    from sglang_ascend.plugin.requests.weight_updates import cut_head

    model = Drafting()
    cut_head(model, torch.zeros(VOCAB, HIDDEN), head, torch.tensor(DRAFT_VOCABULARY))
    return model


def logits_are_of(model: Drafting, head: torch.Tensor) -> bool:
    from sglang_ascend.plugin.cpu.layers import PreparedLinear

    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    return is_product(PreparedLinear().apply(model.lm_head, x), x, head[DRAFT_VOCABULARY])


def load(model: torch.nn.Module, new_head: torch.Tensor) -> tuple[bool, str]:
    """As an untied checkpoint is loaded: by the name of a parameter that holds the whole head."""
    dict(model.named_parameters())["lm_head.weight"].data.copy_(new_head)
    return True, "done"


def updater_of(model: torch.nn.Module):
    """SGLang's, of a runner that serves ``model``, followed as the workers have it followed."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from sglang_ascend.plugin.requests.weight_updates import follow_weight_updates

    values = {field.name: None for field in fields(WeightUpdater) if field.init}
    values |= {"get_model": lambda: model, "custom_weight_loaders": {}}
    runner = SimpleNamespace(weight_updater=WeightUpdater(**values))
    follow_weight_updates(runner)
    return runner.weight_updater


def update(model: torch.nn.Module, new_head: torch.Tensor) -> tuple[bool, str]:
    model.load_weights = lambda named_tensors: load(model, new_head)
    return updater_of(model).load_weights_from_distributed([])


def test_an_update_of_the_mtp_layer_loads_the_whole_head_and_cuts_it_again(drafting, head):
    assert logits_are_of(drafting, head)
    assert update(drafting, -head) == (True, "Succeeded to update parameter online.")
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
    def fail(named_tensors):
        raise RuntimeError("no such file")

    drafting.load_weights = fail
    succeeded, message = updater_of(drafting).load_weights_from_distributed([])
    assert not succeeded and "no such file" in message
    assert logits_are_of(drafting, head)


class Latent(torch.nn.Module):
    """A layer's attention as SGLang's fused prolog (SGLANG_NPU_USE_MLAPO) leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.w_kc = torch.randn(2, 5, 3).transpose(1, 2)  # as SGLang lays it out
        self.mla_preprocess = SimpleNamespace(w_kc=self.w_kc.contiguous())

    def load_weights(self, named_tensors) -> None:
        self.w_kc.copy_(torch.randn(2, 3, 5))


def test_the_prolog_multiplies_by_the_new_weights_where_a_captured_graph_reads_them():
    attention = Latent()
    copy = attention.mla_preprocess.w_kc
    before, place = copy.clone(), copy.data_ptr()
    succeeded, _ = updater_of(attention).load_weights_from_distributed([])
    assert succeeded
    assert not torch.equal(copy, before)
    assert torch.equal(copy, attention.w_kc)
    assert attention.mla_preprocess.w_kc.data_ptr() == place


def test_quantized_linears_take_no_tensors_one_by_one(drafting, head):
    """They would be collected for a layer whose product is not made again."""
    from sglang_ascend.plugin.quantization.linear import QuantizedLinear

    drafting.lm_head.quant_method = QuantizedLinear("lm_head")
    drafting.load_weights = lambda named_tensors: load(drafting, -head)
    updater = updater_of(drafting)
    for refused in (updater.load_weights_from_distributed, updater.update_weights_from_tensor):
        succeeded, message = refused([])
        assert not succeeded and "/update_weights_from_disk" in message
    assert logits_are_of(drafting, head)


def test_a_folder_that_the_mtp_layer_cannot_take_leaves_the_target_s_former_weights(
    drafting, monkeypatch
):
    """SGLang loads the target's weights before it asks the MTP layer."""
    from sglang_ascend.plugin.requests import weight_updates

    target, loaded = torch.nn.Module(), []

    def load_folder(updater, folder: str, *arguments) -> tuple[bool, str, bool]:
        loaded.append((updater.get_model(), folder))
        updater.model_config.model_path = folder
        return True, "done", True

    monkeypatch.setattr(weight_updates.FollowedUpdater, "_load", load_folder)
    reasons = {drafting: "it is quantized and this server's layers are float"}
    monkeypatch.setattr(weight_updates, "refused_folder", lambda model, _: reasons.get(model))
    of_target = replace(updater_of(target), model_config=SimpleNamespace(model_path="old"))
    of_layer = replace(updater_of(drafting), model_config=SimpleNamespace(), target=of_target)
    for updater in (of_layer, of_target):
        updater.model_config.model_path = "old"
    assert of_target.update_weights_from_disk("new", "auto") == (True, "done")
    assert of_layer.update_weights_from_disk("new", "auto") == (False, reasons[drafting])
    assert loaded == [(target, "new"), (target, "old")]


@pytest.mark.parametrize("is_quantized", [True, False])
def test_a_quantized_head_is_taken_where_drafts_have_rows_of_one(monkeypatch, is_quantized):
    from sglang_ascend.plugin.quantization import updates
    from sglang_ascend.plugin.quantization.head import QuantizedHead
    from sglang_ascend.plugin.quantization.linear import QuantizedLinear
    from sglang_ascend.plugin.requests.draft_heads.lists import ListedHeads
    from sglang_ascend.quantization.weight import HEAD

    new = SimpleNamespace(schemes={HEAD: None})
    monkeypatch.setattr(updates, "quantized_checkpoint", lambda folder: new)
    model, heads = Drafting(), ListedHeads.__new__(ListedHeads)
    of_target = QuantizedHead.__new__(QuantizedHead) if is_quantized else None
    heads.target_head = SimpleNamespace(quant_method=of_target)
    model.lm_head.quant_method = heads
    model.model.embed_tokens.quant_method = QuantizedLinear("a linear")
    reason = updates.refused_folder(model, "new")
    assert reason is None if is_quantized else "has a quantized head" in reason


def test_unfollowed_the_old_weights_stay_in_use_or_the_head_is_not_found(drafting, head):
    """The control: what following is for."""
    assert logits_are_of(drafting, head)
    head.data.copy_(-head)
    assert not logits_are_of(drafting, head)
    with pytest.raises(KeyError):
        load(drafting, head)


def test_every_method_that_loads_weights_is_followed():
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from sglang_ascend.plugin.requests.weight_updates import FollowedUpdater

    loaders = {name for name in vars(WeightUpdater) if name.startswith(("update_w", "load_w"))}
    followed = {name for name in vars(FollowedUpdater) if not name.startswith("_")}
    assert loaders == followed & set(vars(WeightUpdater))
    for name in loaders:
        ours, theirs = (
            inspect.signature(vars(cls)[name]) for cls in (FollowedUpdater, WeightUpdater)
        )
        assert list(ours.parameters) == list(theirs.parameters)


@pytest.mark.usefixtures("loaded_plugins")
def test_the_worker_of_a_server_without_speculation_follows_its_model(drafting, head, monkeypatch):
    from sglang.srt.managers import tp_worker

    from sglang_ascend.plugin.cpu import plain_worker

    made = updater_of(drafting)
    runner = SimpleNamespace(weight_updater=made, spec_algorithm=SimpleNamespace(is_none=bool))
    runner.spec_algorithm.is_none = lambda: True
    original = plain_worker.PlainWorker.__mro__[1]
    monkeypatch.setattr(
        original, "_init_model_runner", lambda self: setattr(self, "_model_runner", runner)
    )
    monkeypatch.setattr(plain_worker, "SeededSampler", lambda: "seeded")
    worker = tp_worker.TpModelWorker.__new__(tp_worker.TpModelWorker)
    assert isinstance(worker, plain_worker.PlainWorker)
    worker._init_model_runner()
    assert runner.weight_updater is not made and runner.sampler == "seeded"
