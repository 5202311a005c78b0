"""Weight updates, which write in place: what was made of the weights before follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.platforms import current_platform

from sglang_ascend.plugin.cpu.layers import forget_prepared_weights


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


_CUT_HEADS: WeakKeyDictionary[torch.nn.Module, CutHead] = WeakKeyDictionary()


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
    head = _CUT_HEADS[model] = CutHead(embedding, whole, token_ids, whole.data[token_ids])
    head.give_rows(model)


class FollowedUpdater(WeightUpdater):
    """SGLang's, for a model of whose weights something was made: the cut draft head, which is a
    copy, and packed weights."""

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str,
        weight_name_filter: Callable[[str], bool] | None = None,
        recapture_cuda_graph: bool = False,
    ) -> tuple[bool, str]:
        with _followed(self.get_model()):
            return super().update_weights_from_disk(
                model_path, load_format, weight_name_filter, recapture_cuda_graph
            )

    def load_weights_from_distributed(
        self, named_tensors: list[tuple[str, torch.Tensor]]
    ) -> tuple[bool, str]:
        with _followed(self.get_model()):
            return super().load_weights_from_distributed(named_tensors)

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Any]], load_format: str | None = None
    ) -> tuple[bool, str]:
        with _followed(self.get_model()):
            return super().update_weights_from_tensor(named_tensors, load_format)

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        with _followed(self.get_model()):
            return super().update_weights_from_ipc(recv_req)


def follow_weight_updates(runner: Any) -> None:
    """For a ModelRunner: what loads weights into its model is followed from now on."""
    values = {field.name: getattr(runner.weight_updater, field.name) for field in _FIELDS}
    runner.weight_updater = FollowedUpdater(**values)


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
        forget_prepared_weights()
