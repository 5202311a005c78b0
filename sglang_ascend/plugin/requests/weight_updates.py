"""Weight updates, which write in place: what was made of the weights before follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.platforms import current_platform

from sglang_ascend.plugin.cpu.layers import forget_prepared_weights
from sglang_ascend.plugin.npu.latent_attention import follow_absorbed_weights
from sglang_ascend.plugin.quantization.head import QuantizedHead
from sglang_ascend.plugin.quantization.updates import refused_folder, refused_tensors


@dataclass(frozen=True)
class CutHead:
    """The head of an MTP layer, of which only the rows of a draft vocabulary are computed."""

    embedding: torch.Tensor  # [vocab_size, hidden_size], the target's own
    whole: torch.Tensor  # [vocab_size, hidden_size], the target's own
    token_ids: torch.Tensor  # int64 [draft_vocab_size]
    rows: torch.Tensor  # [draft_vocab_size, hidden_size]; stays in place, for graphs read it there

    def give_whole(self, model: Any) -> None:
        """A checkpoint has the whole head: SGLang's loaders find no smaller one."""
        share_embedding_and_head(model, self.embedding, self.whole)

    def give_rows(self, model: Any) -> None:
        self.rows.copy_(self.whole.data[self.token_ids])
        share_embedding_and_head(model, self.embedding, self.rows)


class FollowingHead(Protocol):
    """A head that was made of the target's."""

    def give_whole(self, model: Any) -> None:
        """Before weights are loaded into ``model``."""
        ...

    def give_rows(self, model: Any) -> None:
        """Makes it of the target's weights as they are now."""
        ...


_CUT_HEADS: WeakKeyDictionary[torch.nn.Module, FollowingHead] = WeakKeyDictionary()


@dataclass(frozen=True)
class CutQuantizedHead:
    """The same of a quantized head, whose weight is its method's."""

    whole: QuantizedHead  # the target's own
    token_ids: torch.Tensor  # int64 [draft_vocab_size]

    def give_whole(self, model: Any) -> None:
        """SGLang's loaders bring an MTP layer no quantized head."""

    def give_rows(self, model: Any) -> None:
        model.lm_head.quant_method = self.whole.cut(self.token_ids)


def separate_head(model: Any) -> None:
    """Of an MTP layer whose head is its embedding, one module: drafts may have a head of their own,
    of fewer rows or quantized, and the embedding may not."""
    if model.lm_head is model.model.embed_tokens:
        head = copy(model.lm_head)
        head._parameters = dict(head._parameters)
        model.lm_head = head


def share_embedding_and_head(model: Any, embedding: torch.Tensor, head: torch.Tensor) -> None:
    """As ``set_embed_and_head`` of SGLang's models, of which some wait for a CUDA device."""
    for layer, weight in ((model.model.embed_tokens, embedding), (model.lm_head, head)):
        del layer.weight
        layer.weight = weight
    current_platform.empty_cache()
    current_platform.synchronize()


def cut_head(
    model: torch.nn.Module, embedding: torch.Tensor, whole: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Gives the MTP layer the rows of its draft vocabulary, from now on those of the weights."""
    follow_head(model, CutHead(embedding, whole, token_ids, whole.data[token_ids]))


def follow_head(model: torch.nn.Module, head: FollowingHead) -> None:
    """Gives the MTP layer this head, and makes it anew after every update of weights."""
    _CUT_HEADS[model] = head
    head.give_rows(model)


def share_quantized_head(model: Any, head: QuantizedHead, token_ids: torch.Tensor | None) -> None:
    """Gives the MTP layer the target's method, or that of its draft vocabulary's rows."""
    if token_ids is None:
        model.lm_head.quant_method = head
        return
    follow_head(model, CutQuantizedHead(head, token_ids))


@dataclass(frozen=True, kw_only=True)
class FollowedUpdater(WeightUpdater):
    """SGLang's, for a model of whose weights something was made: the cut draft head, which is a
    copy, and packed weights. What fails to load leaves the former weights.

    Attributes:
        target: of an MTP layer the target's updater, which SGLang asks first.
        former: the folder that was served before the last update, if there was one.
    """

    target: FollowedUpdater | None = None
    former: list[str] = field(default_factory=list)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str,
        weight_name_filter: Callable[[str], bool] | None = None,
        recapture_cuda_graph: bool = False,
    ) -> tuple[bool, str]:
        before = self.model_config.model_path
        arguments = load_format, weight_name_filter, recapture_cuda_graph
        reason = refused_folder(self.get_model(), model_path)
        if reason is None:
            succeeded, message, began = self._load(model_path, *arguments)
            if succeeded:
                self.former[:] = [before]
                return True, message
            self.model_config.model_path = before
            if began:
                self._load(before, *arguments)
            reason = f"{model_path} was not loaded, the former weights serve: {message}"
        if self.target is not None and self.target.former:
            self.target._load(self.target.former.pop(), *arguments)
        return False, reason

    def _load(self, model_path: str, *arguments: Any) -> tuple[bool, str, bool]:
        """SGLang's result, and whether a weight may have been replaced.

        Its way back reads the new folder once more, and so fails as that did.
        """
        with _followed(self.get_model()):
            try:
                succeeded, message = super().update_weights_from_disk(model_path, *arguments)
            except Exception as error:
                return False, str(error), True
        reason, rolled_back, _ = message.partition("\nRolling back")
        return succeeded, reason, bool(rolled_back)

    def load_weights_from_distributed(
        self, named_tensors: list[tuple[str, torch.Tensor]]
    ) -> tuple[bool, str]:
        return self._one_by_one(super().load_weights_from_distributed, named_tensors)

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Any]], load_format: str | None = None
    ) -> tuple[bool, str]:
        return self._one_by_one(super().update_weights_from_tensor, named_tensors, load_format)

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return self._one_by_one(super().update_weights_from_ipc, recv_req)

    def _one_by_one(
        self, load: Callable[..., tuple[bool, str]], *arguments: Any
    ) -> tuple[bool, str]:
        """``load`` brings weights without the others of their layer."""
        if reason := refused_tensors(self.get_model()):
            return False, reason
        with _followed(self.get_model()):
            return load(*arguments)


def follow_weight_updates(runner: Any, target: Any = None) -> None:
    """For a ModelRunner: what loads weights into its model is followed from now on.

    ``target`` is the ModelRunner whose MTP layer ``runner`` runs, followed already.
    """
    values = {field.name: getattr(runner.weight_updater, field.name) for field in _FIELDS}
    runner.weight_updater = FollowedUpdater(**values, target=target and target.weight_updater)


_FIELDS = fields(WeightUpdater)


@contextmanager
def _followed(model: torch.nn.Module) -> Iterator[None]:
    if model in _CUT_HEADS:
        _CUT_HEADS[model].give_whole(model)
    try:
        yield
    finally:
        # The target's head may have changed without its MTP layer being updated.
        for drafting, head in list(_CUT_HEADS.items()):
            head.give_rows(drafting)
        follow_absorbed_weights(model)
        forget_prepared_weights()
