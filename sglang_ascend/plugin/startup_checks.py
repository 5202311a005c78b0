"""Refuses a checkpoint before SGLang reads its config.json, and fails on it with a traceback."""

from __future__ import annotations

from typing import Any

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
