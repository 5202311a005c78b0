"""What SGLang's request validation leaves out and its scheduler then dies of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refuse_unknown_token_ids(
    validate: Callable[..., None], self: Any, obj: Any, input_ids: list[int] | None
) -> None:
    """Around ``TokenizerManager._validate_one_request``. Raises ValueError, which becomes a 400.

    Only ids that the client sent are judged: a tokenizer's own need no check.
    """
    if input_ids and getattr(obj, "input_ids", None) is not None:
        vocab_size = self.model_config.vocab_size
        wrong = [token for token in (min(input_ids), max(input_ids)) if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(
                f"input_ids contains {wrong[0]}, which is no token of this model: "
                f"send ids from 0 to {vocab_size - 1}."
            )
    validate(self, obj, input_ids)


def refuse_unknown_stop_tokens(verify: Callable[..., None], self: Any, vocab_size: int) -> None:
    """Around ``SamplingParams.verify``. Raises ValueError, which becomes a 400.

    Only ``min_new_tokens`` makes the server index logits with them; else they just never occur.
    """
    wrong = [token for token in self.stop_token_ids or () if not 0 <= token < vocab_size]
    if wrong and self.min_new_tokens > 0:
        raise ValueError(
            f"stop_token_ids contains {wrong[0]}, which is no token of this model: "
            f"send ids from 0 to {vocab_size - 1}."
        )
    verify(self, vocab_size)
