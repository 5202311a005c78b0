"""Which ``custom_logit_processor`` MTP serves: SGLang's thinking budgets, known by their bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import dill
import orjson
from sglang.srt.sampling import custom_logit_processor
from sglang.srt.sampling.custom_logit_processor import ThinkingBudgetLogitProcessor

Model = type[ThinkingBudgetLogitProcessor]  # whose tokens a thinking budget goes by


@cache
def _served() -> dict[bytes, Model]:
    """SGLang's budgets by what their ``to_str`` sends, in any protocol of pickle that a client's
    Python may write."""
    return {
        dill.dumps(model, protocol): model
        for model in ThinkingBudgetLogitProcessor.__subclasses__()
        if model.__module__ == custom_logit_processor.__name__
        for protocol in range(dill.HIGHEST_PROTOCOL + 1)
    }


def budget_model(serialized: str) -> Model:
    """Of a request's ``custom_logit_processor``, of which nothing is unpickled. Raises KeyError,
    TypeError or ValueError where it is not, byte for byte, a name of one of SGLang's budgets."""
    return _served()[bytes.fromhex(orjson.loads(serialized)["callable"])]


def refuse_unserved_processor(obj: Any, vocab_size: int) -> None:
    """Of one request, before SGLang unpickles what it sends. Raises ValueError."""
    try:
        model = budget_model(obj.custom_logit_processor)
    except (KeyError, TypeError, ValueError):
        names = ", ".join(sorted({model.__name__ for model in _served().values()}))
        raise ValueError(
            "custom_logit_processor must be what to_str() of one of SGLang's thinking budgets "
            f"gives, for MTP serves no other processor: {names}."
        ) from None
    if max(model.THINKING_START_TOKEN_ID, model.THINKING_END_TOKEN_ID) >= vocab_size:
        raise ValueError(
            f"{model.__name__} is for models of other tokens: this one has {vocab_size}."
        )
    params = (obj.sampling_params or {}).get("custom_params")
    if params is not None and not isinstance(params, dict):
        raise ValueError('custom_params must be an object such as {"thinking_budget": 512}.')
    budget = (params or {}).get("thinking_budget")
    if budget is not None and not isinstance(budget, int):
        raise ValueError(f"thinking_budget is {budget!r}: send a number of tokens.")
