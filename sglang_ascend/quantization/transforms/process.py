"""`flex_smooth_quant` of a recipe, in ModelSlim's words."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Subgraph = Literal["norm-linear", "ov", "up-down"]


class FlexSmooth(BaseModel):
    """`type: flex_smooth_quant`: what is searched where `alpha` or `beta` is not given.

    Attributes:
        enable_subgraph_type: kinds of pairs.
        include, exclude: globs of the linears that read a pair's channels.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["flex_smooth_quant"]
    alpha: float | None = Field(default=None, ge=0, le=1)
    beta: float | None = Field(default=None, ge=0, le=1)
    enable_subgraph_type: list[Subgraph] = ["norm-linear", "ov", "up-down"]
    include: list[str] = ["*"]
    exclude: list[str] = []

    def smooths(self, kind: str, module: str) -> bool:
        """Whether the inputs of linear `module`, which a pair of this kind makes, are smoothed."""
        included = any(fnmatchcase(module, glob) for glob in self.include)
        excluded = any(fnmatchcase(module, glob) for glob in self.exclude)
        return kind in self.enable_subgraph_type and included and not excluded
