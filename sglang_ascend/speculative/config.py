"""The algorithm's name, and the lengths of a drafted chain: defaults and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

NAME = "MTP"  # --speculative-algorithm
# What SGLang calls a separate small model that drafts, and its name where our step runs it.
STANDALONE, DRAFT_MODEL = "STANDALONE", "DRAFT_MODEL"
DEFAULT_NUM_STEPS = 3
# Fused attention on Ascend serves at most 16 query rows per request and verify has K+1 of them.
MAX_NUM_STEPS = 15


class MTPConfigError(ValueError):
    """A flag of the chain is wrong; the message is one sentence that names it and the remedy."""


@dataclass(frozen=True)
class MTPConfig:
    """K draft steps make K tokens; verify runs K+1 rows (the last accepted token comes first)."""

    num_steps: int = DEFAULT_NUM_STEPS

    @property
    def num_draft_tokens(self) -> int:
        return self.num_steps + 1


def resolve_config(
    num_steps: int | None, topk: int | None, num_draft_tokens: int | None
) -> MTPConfig:
    """The chain that ``--speculative-{num-steps,eagle-topk,num-draft-tokens}`` describe.

    None means "not given". Raises MTPConfigError for anything but a chain of 1..15 steps.
    """
    if topk not in (None, 1):
        raise MTPConfigError(
            f"--speculative-eagle-topk {topk} asks for a tree, but a step verifies a chain: "
            "set it to 1 or leave it out."
        )
    if num_steps is None:
        return _from_draft_tokens(num_draft_tokens)
    if not 1 <= num_steps <= MAX_NUM_STEPS:
        raise MTPConfigError(
            f"--speculative-num-steps must be between 1 and {MAX_NUM_STEPS}, got {num_steps}: "
            f"leave it out for {DEFAULT_NUM_STEPS}."
        )
    if num_draft_tokens not in (None, num_steps + 1):
        raise MTPConfigError(
            f"--speculative-num-draft-tokens {num_draft_tokens} does not fit a chain of "
            f"{num_steps} steps: set it to {num_steps + 1} or leave it out."
        )
    return MTPConfig(num_steps=num_steps)


def _from_draft_tokens(num_draft_tokens: int | None) -> MTPConfig:
    if num_draft_tokens is None:
        return MTPConfig()
    if not 2 <= num_draft_tokens <= MAX_NUM_STEPS + 1:
        raise MTPConfigError(
            f"--speculative-num-draft-tokens must be between 2 and {MAX_NUM_STEPS + 1} (one more "
            f"than the draft steps), got {num_draft_tokens}: "
            f"leave it out for {DEFAULT_NUM_STEPS + 1}."
        )
    return MTPConfig(num_steps=num_draft_tokens - 1)
