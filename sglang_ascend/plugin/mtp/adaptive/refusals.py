"""What is not served where the chains of a server's steps differ in length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_ascend import env
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import value_of
from sglang_ascend.plugin.mtp.sampling import lossy_acceptance


def unsupported_with_chains(server_args: Any) -> dict[str, bool]:
    """What is refused beside the ways that were asked for, and whether it was given."""
    unsupported: dict[str, bool] = {}
    if asks_adaptive(server_args):
        unsupported |= _unsupported_with_adaptive(server_args)
    else:
        unsupported[f"{env.ADAPTIVE_COSTS.name} without --speculative-adaptive"] = bool(
            file_of_costs()
        )
    if most_looked_up():
        variable = env.LOOKUP_DRAFTS.name
        unsupported |= _unsupported_where_the_layer_is_skipped(variable, server_args)
        unsupported |= _unsupported_where_captured(variable)
    if ends_chains():
        unsupported |= _unsupported_with_ends(server_args)
    return unsupported


def asks_adaptive(server_args: Any) -> bool:
    given = getattr(server_args, "_raw_input", None) or {}
    return bool(given.get("speculative_adaptive", server_args.speculative_adaptive))


def most_looked_up() -> int:
    return value_of(env.LOOKUP_DRAFTS)


def file_of_costs() -> Path | None:
    return value_of(env.ADAPTIVE_COSTS)


def ends_chains() -> bool:
    return value_of(env.DRAFT_P_MIN) > 0


def _unsupported_with_adaptive(server_args: Any) -> dict[str, bool]:
    flag = "--speculative-adaptive"
    return _unsupported_where_the_layer_is_skipped(flag, server_args) | {
        # SGLang's own worker knows no other length.
        f"{flag} on this device": not device_profile().runs_step,
        "--speculative-adaptive-config": server_args.speculative_adaptive_config is not None,
    }


def _unsupported_with_ends(server_args: Any) -> dict[str, bool]:
    variable = env.DRAFT_P_MIN.name
    unsupported = _unsupported_with_lengths(variable, server_args)
    return (
        unsupported
        | _unsupported_where_captured(variable)
        | {
            # It measures what K drafts cost and keep, and chooses K.
            f"{variable} with --speculative-adaptive": asks_adaptive(server_args),
        }
    )


def _unsupported_where_the_layer_is_skipped(flag: str, server_args: Any) -> dict[str, bool]:
    """What ``flag`` is not served with, for there are steps that leave the MTP layer out."""
    return _unsupported_with_lengths(flag, server_args) | {
        # Slots of the cache are filled that no prefill of this server has written.
        f"{flag} with --enable-hierarchical-cache": bool(server_args.enable_hierarchical_cache),
    }


def _unsupported_where_captured(flag: str) -> dict[str, bool]:
    """``flag`` has the host read drafts and decide by them; a captured step is drafted whole, and
    SGLang's own worker knows one length of chains."""
    profile = device_profile()
    return {f"{flag} on this device": not profile.runs_step or profile.captures_step}


def _unsupported_with_lengths(flag: str, server_args: Any) -> dict[str, bool]:
    """What ``flag`` is not served with, for steps have chains of different lengths."""
    return {
        # A prompt comes without a prefill, by which the length of its chain is known.
        f"{flag} with --disaggregation-mode": server_args.disaggregation_mode != "null",
        f"{flag} with {env.LOSSY_ACCEPTANCE.name}": lossy_acceptance.policy() is not None,
    }
