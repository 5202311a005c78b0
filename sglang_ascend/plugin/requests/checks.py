"""What SGLang's request validation leaves out and its scheduler then dies of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from numbers import Integral
from typing import Any

from msgspec.structs import fields
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.sampling.sampling_params import MAX_STOP_REGEX_LEN

from sglang_ascend.plugin.mtp.sampling.served_budgets import refuse_unserved_processor

# Beyond these logits leave what float32 holds, and a row of them is no distribution.
LARGEST_BIAS, LEAST_REPETITION_PENALTY = 1e30, 1e-6
# By an infinite one what a grammar forbids, -inf, is no number.
LARGEST_TEMPERATURE = 1e30
LARGEST_TOP_K = 2**31 - 1  # SGLang's tensor of them is int32
# What a value of a declared type is, and in words; others are compared before they are used.
KINDS = {
    bool: (Integral, "true or false"),
    int: (Integral, "a whole number"),
    int | None: (Integral, "a whole number"),
    str | None: (str, "text"),
}


def refuse_unservable_request(
    validate: Callable[..., None], self: Any, obj: Any, input_ids: list[int] | None
) -> None:
    """Around ``TokenizerManager._validate_one_request``. Raises ValueError, which becomes a 400.

    Only ids that the client sent are judged: a tokenizer's own need no check. A session's request
    may add nothing to what is there. SGLang itself refuses no ids, but not a text of no tokens.
    """
    is_empty = input_ids is not None and len(input_ids) == 0
    if is_empty and not getattr(obj, "session_params", None):
        raise ValueError("the prompt has no tokens: send at least one.")
    if input_ids and getattr(obj, "input_ids", None) is not None:
        vocab_size = self.model_config.vocab_size
        wrong = [token for token in (min(input_ids), max(input_ids)) if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(
                f"input_ids contains {wrong[0]}, which is no token of this model: "
                f"send ids from 0 to {vocab_size - 1}."
            )
    num_logprobs = getattr(obj, "top_logprobs_num", None) or 0
    if num_logprobs > self.model_config.vocab_size:
        raise ValueError(
            f"top_logprobs_num is {num_logprobs}, and this model has "
            f"{self.model_config.vocab_size} tokens: ask for fewer."
        )
    first_logprob = getattr(obj, "logprob_start_len", None)
    if first_logprob is not None and first_logprob < -1:
        raise ValueError(
            f"logprob_start_len is {first_logprob}: send a position of the prompt, or -1 for no "
            "logprobs of it."
        )
    for row in getattr(obj, "input_embeds", None) or ():
        if len(row) != self.model_config.hidden_size or not math.isfinite(sum(row)):
            raise ValueError(
                "input_embeds must have a row of "
                f"{self.model_config.hidden_size} finite numbers for each token."
            )
    if not isinstance(getattr(obj, "positional_embed_overrides", None), PositionalEmbeds | None):
        raise ValueError("positional_embed_overrides holds tensors, which no JSON has: drop it.")
    _refuse_bad_patterns((getattr(obj, "sampling_params", None) or {}).get("stop_regex") or ())
    if getattr(obj, "custom_logit_processor", None):
        args = self.server_args
        if args.speculative_algorithm and args.enable_custom_logit_processor:
            refuse_unserved_processor(obj, self.model_config.vocab_size)
    validate(self, obj, input_ids)


def _refuse_bad_patterns(given: Any) -> None:
    """What is too long for SGLang, or no text, is left to those that judge that. Raises
    ValueError."""
    for pattern in given if isinstance(given, list) else [given]:
        if not isinstance(pattern, str) or len(pattern) > MAX_STOP_REGEX_LEN:
            continue
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"stop_regex {pattern!r} is no regular expression: {error}.") from None


@cache
def _judged(parameters: type) -> list[tuple[str, tuple[type, str]]]:
    """Fields whose types are judged, and what they must be."""
    return [(field.name, KINDS[field.type]) for field in fields(parameters) if field.type in KINDS]


def refuse_unservable_parameters(verify: Callable[..., None], self: Any, vocab_size: int) -> None:
    """Around ``SamplingParams.verify``. Raises ValueError, which becomes a 400.

    ``/generate`` has judged the types of what it was sent; other paths and programs have not. Stop
    tokens index logits where any request of the batch has ``min_new_tokens``. Without it those of
    no token just never occur, and are left out.
    """
    for name, (kind, words) in _judged(type(self)):
        value = getattr(self, name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is of type {type(value).__name__}: send {words}.")
    for token, bias in (self.logit_bias or {}).items():
        if not isinstance(bias, int | float) or not abs(bias) <= LARGEST_BIAS:
            raise ValueError(
                f"logit_bias of {token} is {bias}: send a number from {-LARGEST_BIAS:g} to "
                f"{LARGEST_BIAS:g}."
            )
    if self.temperature > LARGEST_TEMPERATURE:
        raise ValueError(
            f"temperature is {self.temperature}: send at most {LARGEST_TEMPERATURE:g}."
        )
    if 0 < self.repetition_penalty < LEAST_REPETITION_PENALTY:
        raise ValueError(
            f"repetition_penalty is {self.repetition_penalty}: send at least "
            f"{LEAST_REPETITION_PENALTY:g}."
        )
    if self.top_k > LARGEST_TOP_K:
        raise ValueError(f"top_k is {self.top_k}: send at most {LARGEST_TOP_K}, or -1 for all.")
    wrong = [token for token in self.stop_token_ids or () if not 0 <= token < vocab_size]
    if wrong and self.min_new_tokens > 0:
        raise ValueError(
            f"stop_token_ids contains {wrong[0]}, which is no token of this model: "
            f"send ids from 0 to {vocab_size - 1}."
        )
    if wrong:
        self.stop_token_ids = set(self.stop_token_ids).difference(wrong)
    verify(self, vocab_size)
