"""The lossy policy of a server, if its operator asked for one: $SGLANG_ASCEND_LOSSY_ACCEPTANCE."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_ascend import env
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.plugin.requests.pool_state import PoolState
from sglang_ascend.sampling import lossy
from sglang_ascend.sampling.thinking import OUTSIDE, Delimiters, ThinkingSections

logger = logging.getLogger(__name__)


def refuse_bad_policy(server_args: Any) -> None:
    """Raises StartupRefused."""
    asked = policy()
    if isinstance(asked, lossy.Relaxed) and server_args.skip_tokenizer_init:
        raise StartupRefused(
            f"{env.LOSSY_ACCEPTANCE.name} with --skip-tokenizer-init cannot name the tokens that "
            "begin and end thinking: drop that flag."
        )
    if asked is not None and server_args.disaggregation_mode != "null":
        raise StartupRefused(
            f"{env.LOSSY_ACCEPTANCE.name} needs what prefill knows of a request, which is not "
            "sent with --disaggregation-mode: unset it."
        )


def policy() -> lossy.Threshold | lossy.Relaxed | None:
    """What the variable asks for. Raises StartupRefused."""
    name, text = env.LOSSY_ACCEPTANCE.name, env.LOSSY_ACCEPTANCE.get()
    try:
        asked = lossy.parse(text)
    except ValueError as error:
        raise StartupRefused(f"{name}={text!r} is not usable: it must be {error}.") from None
    if asked is not None and not device_profile().runs_step:
        raise StartupRefused(f"{name} is not served on CUDA: unset it.")
    return asked


class RelaxedInThinking(PoolState):
    """Relaxed acceptance of a server's requests, and which of them are thinking."""

    def __init__(self, policy: lossy.Relaxed, tokenizer: Any, num_rows: int, device: Any) -> None:
        self.policy = policy
        self._delimiters = Delimiters(
            *(_token_id(tokenizer, text) for text in (policy.start, policy.end))
        )
        self._sections = ThinkingSections(num_rows, device)

    def restart(self, reqs: list[Req], rows: torch.Tensor) -> None:
        known = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
        self._sections.restart(rows, [self._delimiters] * len(reqs), known)

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor, num_kept: torch.Tensor) -> None:
        self._sections.commit(rows, self._sections.along(rows, tokens), num_kept)

    def accept(
        self, rows: torch.Tensor, probs: torch.Tensor, candidates: torch.Tensor, drawn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts that the target drew itself, or that will do while the request is thinking.

        ``rows`` of the pool [batch], ``probs`` [batch, K+1, vocab_size], ``drawn`` [batch, K+1].
        """
        drafts = candidates[:, 1:]
        along = self._sections.along(rows, candidates)
        will_do = (along[:, :-1] != OUTSIDE) & self.policy.accepts(probs[:, :-1], drafts)
        tokens, accept_lens = lossy.emit(will_do | (drafts == drawn[:, :-1]), drafts, drawn)
        self._sections.commit(rows, along, accept_lens)
        return tokens, accept_lens


def warn(policy: lossy.Threshold | lossy.Relaxed | None) -> None:
    if policy is not None:
        logger.warning(
            "%s: replies are LOSSY, they no longer have the model's own distribution (%s).",
            env.LOSSY_ACCEPTANCE.name,
            policy,
        )


def _token_id(tokenizer: Any, text: str) -> int:
    token = tokenizer.convert_tokens_to_ids(text)
    if token is None or token == tokenizer.unk_token_id:
        raise StartupRefused(
            f"{env.LOSSY_ACCEPTANCE.name} names {text!r}, which is no token of this model: "
            "name its own start and end of thinking, relaxed:TOP_N,DELTA,START,END."
        )
    return token
