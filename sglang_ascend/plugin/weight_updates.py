"""Weight updates on CPU, which write in place: what was made of the weights before follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sglang_ascend.plugin.prepared_weights import forget_prepared_weights


@dataclass(frozen=True)
class CutHead:
    """The head of an MTP layer, of which only the rows of a draft vocabulary are computed."""

    embedding: torch.Tensor  # [vocab_size, hidden_size], the target's own
    whole: torch.Tensor  # [vocab_size, hidden_size], the target's own
    token_ids: torch.Tensor  # int64 [draft_vocab_size]
    rows: torch.Tensor  # [draft_vocab_size, hidden_size]; stays in place, for graphs read it there

    def give_whole(self, model: Any) -> None:
        """A checkpoint has the whole head: SGLang's loaders find no smaller one."""
        model.set_embed_and_head(self.embedding, self.whole)

    def give_rows(self, model: Any) -> None:
        self.rows.copy_(self.whole.data[self.token_ids])
        model.set_embed_and_head(self.embedding, self.rows)


_CUT_HEADS: WeakKeyDictionary[torch.nn.Module, CutHead] = WeakKeyDictionary()


def cut_head(
    model: torch.nn.Module, embedding: torch.Tensor, whole: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Gives the MTP layer the rows of its draft vocabulary, from now on those of the weights."""
    head = _CUT_HEADS[model] = CutHead(embedding, whole, token_ids, whole.data[token_ids])
    head.give_rows(model)


def follow_weight_update(
    update: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Around every method of ``WeightUpdater``, ``args[0]``, that loads weights into a model."""
    model = args[0].get_model()
    if model in _CUT_HEADS:
        _CUT_HEADS[model].give_whole(model)
    try:
        return update(*args, **kwargs)
    finally:
        # The target's head may have changed without its MTP layer being updated.
        for drafting, head in list(_CUT_HEADS.items()):
            head.give_rows(drafting)
        forget_prepared_weights()
