"""What a start settles first: SGLang's own names are served as ours on our CPU platform; a
checkpoint is refused before SGLang reads its config.json, and fails on it with a traceback; and so
is a trace folder that no process could write to. Variables that nothing reads are warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.environ import envs

from sglang_ascend import env
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import StartupRefused, unwritable, value_of
from sglang_ascend.plugin.hooks.registration import (
    apply_hooks,
    hooked_from_the_start,
    require_hooks,
    tell_processes,
)
from sglang_ascend.speculative.config import DRAFT_MODEL, NAME, STANDALONE

# SGLang's names, which it does not serve on a CPU and reserves, and ours.
SERVED_AS = {"NEXTN": NAME, "EAGLE": NAME, STANDALONE: DRAFT_MODEL}

HTTP_WORKER_TIMEOUT_S = 120

logger = logging.getLogger(__name__)


def register_startup_checks() -> None:
    """SGLang's slot for what must come before any reader of the algorithm."""

    @register_resolution_hook("handle_aux_hidden_state_capture")
    def before_the_model_is_read(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        if device_profile().emulates:
            serve_as_ours(server_args)
        algorithm = _algorithm(server_args)
        tell_processes(serves_mtp=algorithm == NAME)
        if algorithm == NAME or hooked_from_the_start():
            apply_hooks()
            require_hooks()
            load_in_http_workers()
        if algorithm in (NAME, DRAFT_MODEL):
            warn_of_unknown_variables()
            refuse_bad_checkpoint(server_args)
            leave_out_remote_code(server_args)


def _algorithm(server_args: Any) -> str:
    return str(resolving_view(server_args).speculative_algorithm).upper()


def serve_as_ours(server_args: Any) -> None:
    """Changes SGLang's name to ours, for the same defaults, refusals, relay and KV reserve."""
    asked = _algorithm(server_args)
    if (ours := SERVED_AS.get(asked)) is not None:
        declare_resolution(server_args, "sglang_ascend", speculative_algorithm=ours)
        logger.info("--speculative-algorithm %s is served as %s on this platform.", asked, ours)


def load_in_http_workers() -> None:
    """What the processes of ``--tokenizer-worker-num`` import is in the environment. One that is
    still importing after SGLang's 10 s is ended, and the next one too."""
    for variable, value in (
        (envs.SGLANG_HTTP_SERVER_APP_PATH, "sglang_ascend.plugin.http_workers:app"),
        (envs.SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT, HTTP_WORKER_TIMEOUT_S),
    ):
        if not variable.is_set():
            variable.set(value)


def warn_of_unknown_variables() -> None:
    """One that is misspelt would be left out in silence."""
    for sentence in env.unknown_variables():
        logger.warning("sglang-ascend: %s", sentence)


def refuse_bad_checkpoint(server_args: Any) -> None:
    """SGLang reads config.json long before an algorithm is asked. Raises StartupRefused."""
    if server_args.load_format == "dummy":
        return
    from sglang_ascend.checkpoint import CheckpointError

    validate = _validate_draft_model if _algorithm(server_args) == DRAFT_MODEL else _validate
    try:
        validate(server_args)
    except CheckpointError as error:
        raise StartupRefused(str(error)) from None


def leave_out_remote_code(server_args: Any) -> None:
    """Recipes set the flag for published checkpoints, whose Python files nobody needs."""
    if server_args.trust_remote_code:
        declare_resolution(server_args, "sglang_ascend", trust_remote_code=False)
        logger.info(
            "--trust-remote-code is left out: SGLang has the classes of every model that MTP "
            "serves, and no Python file of %s is run.",
            server_args.model_path,
        )


def _validate(server_args: Any) -> None:
    """Of a target and its MTP layer. Raises CheckpointError."""
    from sglang_ascend.checkpoint import validate_checkpoint
    from sglang_ascend.checkpoint.capabilities import INDEXED

    # DeepSeek-V3.2: SGLang's own worker has it, which serves on CUDA.
    served = () if device_profile().runs_step else (INDEXED,)
    validate_checkpoint(
        server_args.model_path,
        server_args.speculative_draft_model_path,
        tokenizer_path=server_args.tokenizer_path,
        skip_tokenizer_init=server_args.skip_tokenizer_init,
        trust_remote_code=server_args.trust_remote_code,
        served=served,
    )


def _validate_draft_model(server_args: Any) -> None:
    """As ``_validate``, of a model that drafts."""
    from sglang_ascend.checkpoint.draft_model import validate_draft_model

    validate_draft_model(
        server_args.model_path,
        server_args.speculative_draft_model_path,
        tokenizer_path=server_args.tokenizer_path,
        trust_remote_code=server_args.trust_remote_code,
    )


def refuse_bad_trace_folder() -> None:
    """Makes the folder of SGLANG_ASCEND_TRACE, if that is set. Raises StartupRefused."""
    folder = value_of(env.TRACE)
    if folder is None:
        return
    if not device_profile().runs_step:
        raise StartupRefused(
            f"{env.TRACE.name} traces the step of this package's worker, which does not serve on "
            "CUDA: unset it."
        )
    if reason := unwritable(folder):
        raise StartupRefused(
            f"{env.TRACE.name}={folder} cannot hold a trace ({reason}): "
            "name a folder that you may write to, or unset it."
        )
