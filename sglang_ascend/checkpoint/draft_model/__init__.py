"""Checks of a model that drafts for another one: its tensors, and that both name tokens alike."""

from sglang_ascend.checkpoint.draft_model.validate import validate_draft_model

__all__ = ["validate_draft_model"]
