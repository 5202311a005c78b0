"""Checks of a checkpoint before anything loads it: one call, one sentence when it is refused."""

from sglang_ascend.checkpoint.errors import CheckpointError
from sglang_ascend.checkpoint.validate import CheckpointSummary, validate_checkpoint

__all__ = ["CheckpointError", "CheckpointSummary", "validate_checkpoint"]
