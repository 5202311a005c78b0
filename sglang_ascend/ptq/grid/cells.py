"""The cells of the grid, in the words of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from sglang_ascend.quantization.formats import FORMATS, INT8
from sglang_ascend.quantization.qconfig import QConfig
from sglang_ascend.quantization.transforms.process import FlexSmooth
from sglang_ascend.quantization.weight import InputKind, InputRule

GROUP = 32
CONTROL = "minmax"


@dataclass(frozen=True)
class Cell:
    """One format by one method; `form` says the weights' and, if they are rounded, the inputs'.

    Attributes:
        scheme: of every linear.
        smoothing: before it, what is folded into the weights.
        inputs: what inputs are rounded by in place of the scheme's; in memory only.
        lut: whether weights are in look-up tables of the scheme's bits instead; in memory only.
    """

    form: str
    method: str
    scheme: QConfig
    smoothing: FlexSmooth | None = None
    inputs: InputRule | None = None
    lut: bool = False

    @property
    def name(self) -> str:
        return f"{self.form} {self.method}"

    @property
    def calibrated(self) -> bool:
        return self.sees_inputs or self.smoothing is not None

    @property
    def sees_inputs(self) -> bool:
        """Whether codes follow from what each linear reads."""
        return self.scheme.calibrated or self.lut

    @property
    def description(self) -> dict[str, Any]:
        """What decides its weights, as JSON."""
        ways: dict[str, Any] = {
            "smoothing": self.smoothing and self.smoothing.model_dump(mode="json"),
            "inputs": self.inputs and repr(self.inputs),
            "lut": self.lut,
        }
        used = {name: value for name, value in ways.items() if value}
        return {"scheme": self.scheme.model_dump(mode="json"), **used}


def _cell(dtype: str, scope: str, method: str = CONTROL, symmetric: bool = True) -> Cell:
    weight = {"dtype": dtype, "scope": scope, "method": method, "symmetric": symmetric}
    ext = {"group_size": GROUP}
    return Cell(dtype, method, QConfig.model_validate({"weight": {**weight, "ext": ext}}))


def _with_inputs(dtype: str, scope: str, input_scope: str) -> Cell:
    weight, act = {"dtype": dtype, "scope": scope}, {"dtype": dtype, "scope": input_scope}
    form, scheme = FORMATS[dtype], {"weight": weight, "act": act}
    return Cell(f"{dtype} A{form.bits}", CONTROL, QConfig.model_validate(scheme))


def _rotated(cell: Cell) -> Cell:
    scheme = cell.scheme.model_dump()
    scheme["act"]["ext"]["rotation"] = True
    return replace(cell, method="rotated", scheme=QConfig.model_validate(scheme))


def _w8a8() -> list[Cell]:
    """int8 weights and inputs, made even in several ways."""
    plain = _with_inputs("int8", "per_channel", "per_token")
    half = FlexSmooth(type="flex_smooth_quant", alpha=0.5, beta=0.5)
    ways = {
        "smooth 0.5": {"smoothing": half},
        "flex": {"smoothing": FlexSmooth(type="flex_smooth_quant")},
        "groups of 64": {"inputs": InputRule(InputKind.PER_TOKEN, INT8, 64)},
    }
    cells = [replace(plain, method=name, **way) for name, way in ways.items()]
    return [plain, *cells, _rotated(plain)]


def _w4a4() -> list[Cell]:
    plain = _with_inputs("int4", "per_channel", "per_token")
    return [plain, _rotated(plain)]


def _integers(bits: int, *methods: str) -> list[Cell]:
    return [_cell(f"int{bits}", "per_group", method, symmetric=False) for method in methods]


def _int3_per_channel() -> list[Cell]:
    """One scale, or one table, for each row."""
    plain = replace(_cell("int3", "per_channel", symmetric=False), form="int3 per channel")
    return [plain, replace(plain, method="k-means tables", lut=True)]


CELLS = (
    *_w8a8(),
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
    *_w4a4(),
    *_integers(3, CONTROL, "mse", "lwc", "gptq", "hqq"),
    *_int3_per_channel(),
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
