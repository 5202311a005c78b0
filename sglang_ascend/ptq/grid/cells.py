"""The cells of the grid, in the words of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from sglang_ascend.quantization.recipe import QConfig

GROUP = 32
CONTROL = "minmax"


@dataclass(frozen=True)
class Cell:
    """One format by one method; `form` says the weights' and, if they are rounded, the inputs'."""

    form: str
    method: str
    scheme: QConfig

    @property
    def name(self) -> str:
        return f"{self.form} {self.method}"

    @property
    def calibrated(self) -> bool:
        return self.scheme.calibrated

    @property
    def description(self) -> dict[str, Any]:
        """What decides its weights, as JSON."""
        return {"scheme": self.scheme.model_dump(mode="json")}


def _cell(dtype: str, scope: str, method: str = CONTROL, symmetric: bool = True) -> Cell:
    weight = {"dtype": dtype, "scope": scope, "method": method, "symmetric": symmetric}
    ext = {"group_size": GROUP}
    return Cell(dtype, method, QConfig.model_validate({"weight": {**weight, "ext": ext}}))


def _with_inputs(dtype: str, scope: str, input_scope: str) -> Cell:
    scheme = {"weight": {"dtype": dtype, "scope": scope}, "act": {"dtype": dtype}}
    scheme["act"]["scope"] = input_scope
    return Cell(f"{dtype} A8", CONTROL, QConfig.model_validate(scheme))


def _integers(bits: int, *methods: str) -> list[Cell]:
    return [_cell(f"int{bits}", "per_group", method, symmetric=False) for method in methods]


CELLS = (
    _with_inputs("int8", "per_channel", "per_token"),
    _with_inputs("fp8_e4m3", "per_block", "per_group"),
    _with_inputs("hif8", "per_channel", "per_token"),
    _with_inputs("mxfp8", "per_block", "per_block"),
    _cell("int8", "per_channel"),
    _cell("hif8", "per_channel"),
    _cell("mxfp8", "per_block"),
    *_integers(4, CONTROL, "mse", "lwc", "gptq", "hqq", "qoq"),
    _cell("nf4", "per_group"),
    _cell("hif4", "per_block"),
    _cell("mxfp4", "per_block"),
    *_integers(3, CONTROL, "mse", "lwc", "gptq", "hqq"),
    *_integers(2, CONTROL, "mse", "lwc", "gptq", "hqq"),
)


def chosen(globs: str) -> Sequence[Cell]:
    """The cells whose name one of `globs`, separated by commas, matches.

    Raises:
        ValueError: one matches none.
    """
    wanted = [glob.strip() for glob in globs.split(",")]
    for glob in wanted:
        if not any(fnmatchcase(cell.name, glob) for cell in CELLS):
            names = ", ".join(cell.name for cell in CELLS)
            raise ValueError(f"--cells {glob} matches none of {names}")
    return [cell for cell in CELLS if any(fnmatchcase(cell.name, glob) for glob in wanted)]
