"""SGLang's STANDALONE by our step, on a CPU: what the scheduler may assume, and what is refused.

SGLang reserves its own names, so the algorithm has another one, to which a start changes
``--speculative-algorithm STANDALONE`` (``startup_checks``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ascend import env
from sglang_ascend.checkpoint.config import read_config
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.plugin.mtp.adaptive.refusals import ends_chains
from sglang_ascend.plugin.mtp.algorithm import MTPAlgorithm
from sglang_ascend.plugin.mtp.refusals import refuse_given
from sglang_ascend.plugin.mtp.refusals import validate_server_args as validate_step
from sglang_ascend.plugin.mtp.sampling import lossy_acceptance
from sglang_ascend.speculative.config import DRAFT_MODEL, STANDALONE


class DraftModelAlgorithm(MTPAlgorithm):
    """As MTP, whose chains it drafts and whose cache it fills, one token ahead of the target's
    (hence the radix keys of EAGLE, pairs of tokens); but no hidden state goes to the draft."""

    def is_standalone(self) -> bool:
        return True


def register_draft_model() -> None:
    @SpeculativeAlgorithm.register(
        DRAFT_MODEL,
        supports_overlap=True,
        validate_server_args=validate_server_args,
        spec_class=DraftModelAlgorithm,
    )
    def worker_class(server_args: Any) -> type:
        from sglang_ascend.plugin.draft_model.worker import DraftModelWorker

        return DraftModelWorker


def validate_server_args(server_args: Any) -> None:
    """Refuses what a draft model was not seen to serve. Raises StartupRefused."""
    refuse_given(_unsupported(server_args), STANDALONE)
    validate_step(server_args, STANDALONE)
    _refuse_short_context(server_args)


def _unsupported(server_args: Any) -> dict[str, bool]:
    not_tried = {
        env.DRAFT_P_MIN.name: ends_chains(),
        env.LOSSY_ACCEPTANCE.name: lossy_acceptance.policy() is not None,
        "--speculative-use-rejection-sampling": server_args.speculative_use_rejection_sampling,
        "--tp-size above 1": server_args.tp_size > 1,
        "--disaggregation-mode": server_args.disaggregation_mode != "null",
        "--enable-hierarchical-cache": bool(server_args.enable_hierarchical_cache),
        "--enable-mixed-chunk": bool(server_args.enable_mixed_chunk),
        "--load-format dummy": server_args.load_format == "dummy",
    }
    return {
        f"{flag}, not tried with a draft model,": bool(given) for flag, given in not_tried.items()
    }


def _refuse_short_context(server_args: Any) -> None:
    """SGLang says so with a traceback, in a process that it has started. Raises StartupRefused."""
    folder = Path(server_args.speculative_draft_model_path)
    longest = read_config(folder).size("max_position_embeddings")
    served = model_config_of(server_args).context_len
    if longest < served:
        raise StartupRefused(
            f"--speculative-draft-model-path {folder} reads at most {longest} tokens and the "
            f"server {served}: pass --context-length {longest}, or another model."
        )
