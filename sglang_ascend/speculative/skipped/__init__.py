"""What steps without drafts leave out of the drafting model's cache, and how it is made good."""

from sglang_ascend.speculative.skipped.rows import SkippedRows, slots_of_pages

__all__ = ["SkippedRows", "slots_of_pages"]
