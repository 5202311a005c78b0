"""Refuses a checkpoint before SGLang reads its config.json, and fails on it with a traceback; and
a trace folder that no process could write to.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_ascend import env
from sglang_ascend.plugin.device import runs_fused_step
from sglang_ascend.plugin.errors import StartupRefused


def refuse_bad_checkpoint(self: Any) -> None:
    """Before ``ServerArgs.resolve_once``, with the flags as given. Raises StartupRefused."""
    is_mtp = str(self.speculative_algorithm).upper() == "MTP"
    already_resolved = getattr(self, "_resolution_finished", False)
    if already_resolved or not is_mtp or self.load_format == "dummy":
        return
    from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint

    try:
        validate_checkpoint(
            self.model_path,
            self.speculative_draft_model_path,
            tokenizer_path=self.tokenizer_path,
            skip_tokenizer_init=self.skip_tokenizer_init,
            trust_remote_code=self.trust_remote_code,
        )
    except CheckpointError as error:
        raise StartupRefused(str(error)) from None


def refuse_bad_trace_folder() -> None:
    """Makes the folder of SGLANG_ASCEND_TRACE, if that is set. Raises StartupRefused."""
    try:
        folder = env.TRACE.get()
    except env.EnvironmentVariableError as error:
        raise StartupRefused(str(error)) from None
    if folder is None:
        return
    if not runs_fused_step():
        raise StartupRefused(
            f"{env.TRACE.name} traces the step of this package's worker, which does not serve on "
            "CUDA: unset it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "not writable"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise StartupRefused(
            f"{env.TRACE.name}={folder} cannot hold a trace ({reason}): "
            "name a folder that you may write to, or unset it."
        )
