"""Recipes: which linear gets which scheme, in the vocabulary of ModelSlim's YAML files."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_ascend.quantization.formats import FORMATS, NumberFormat
from sglang_ascend.quantization.solve import Grid
from sglang_ascend.quantization.transforms.process import FlexSmooth
from sglang_ascend.quantization.weight import HEAD

BUILT_IN = Path(__file__).parent / "recipes"


# Formats of inputs that weights of a format go with, beside float ones.
INPUTS = {
    "int8": ("int8",), "int4": ("int8",), "fp8_e4m3": ("fp8_e4m3",), "hif8": ("hif8",),
    "hif4": ("hif4",), "mxfp8": ("mxfp8",), "mxfp4": ("mxfp4", "mxfp8"),
}  # fmt: skip


class RecipeError(ValueError):
    """One sentence that names the recipe, what is wrong in it and the remedy."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Extension(_Strict):
    """What a method takes beside ModelSlim's four words."""

    group_size: int = Field(default=128, ge=1)
    block_size: int = Field(default=128, ge=1)
    damping: float = Field(default=0.01, gt=0)
    act_order: bool = False
    scale_search: bool = False
    max_error: float | None = Field(default=None, gt=0)


def _check_blocks(scope: str, form: NumberFormat) -> None:
    if form.group_size and scope != "per_block":
        raise ValueError(f"{form.name} has blocks of its own: its scope is per_block")


class InputSpec(_Strict):
    """`act`: what the product does to its input."""

    scope: Literal["per_token", "per_group", "per_block", "per_tensor"]
    dtype: Literal["int8", "fp8_e4m3", "hif8", "hif4", "mxfp8", "mxfp4"]
    symmetric: bool = True
    method: Literal["minmax"] = "minmax"
    ext: Extension = Extension()

    @model_validator(mode="after")
    def _has_a_rule(self) -> InputSpec:
        if self.scope == "per_group" and self.dtype != "fp8_e4m3":
            raise ValueError("inputs are rounded in groups only to fp8_e4m3")
        _check_blocks(self.scope, self.number_format)
        if self.scope == "per_block" and not self.number_format.group_size:
            raise ValueError(f"inputs in {self.dtype} are not scaled per_block")
        if self.scope == "per_tensor" and self.dtype != "int8":
            raise ValueError("a static input (per_tensor) is int8")
        if self.scope != "per_tensor" and not self.symmetric:
            raise ValueError("an input that is scaled at run time is symmetric")
        if self.scope != "per_token" and self.ext.max_error is not None:
            raise ValueError("max_error is of inputs that are scaled per_token")
        return self

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.dtype]


class WeightSpec(_Strict):
    """`weight`: its grid, and the method that picks the codes."""

    scope: Literal["per_channel", "per_group", "per_block"]
    dtype: Literal[
        "int8", "int4", "int3", "int2", "fp8_e4m3",
        "hif8", "hif4", "mxfp8", "mxfp8_e5m2", "mxfp4", "nf4",
    ]  # fmt: skip
    symmetric: bool = True
    method: Literal["minmax", "mse", "gptq", "hqq", "lwc", "qoq"] = "minmax"
    ext: Extension = Extension()

    @model_validator(mode="after")
    def _has_a_grid(self) -> WeightSpec:
        _check_blocks(self.scope, self.number_format)
        if self.grid.block[0] != 1 and self.method == "gptq":
            raise ValueError("gptq corrects row by row, so its scope is per_channel or per_group")
        if self.method != "minmax" or self.ext.scale_search:
            self.grid.check_searchable()
        if self.method in ("hqq", "lwc", "qoq"):
            self._check_integers()
        return self

    def _check_integers(self) -> None:
        """
        Raises:
            ValueError: the method does not have this grid.
        """
        if not self.number_format.is_integer or self.grid.block[0] != 1:
            raise ValueError(f"{self.method} is of integers per_channel or per_group")
        if self.method != "lwc" and self.symmetric:
            raise ValueError(f"{self.method} has zero points: set symmetric to false")
        if self.method == "qoq" and (self.dtype != "int4" or self.scope != "per_group"):
            raise ValueError("qoq is of int4 per_group")

    @property
    def number_format(self) -> NumberFormat:
        return FORMATS[self.dtype]

    @property
    def grid(self) -> Grid:
        if self.number_format.group_size:
            return Grid(self.number_format, (1, self.number_format.group_size), self.symmetric)
        block = {
            "per_channel": (1, None),
            "per_group": (1, self.ext.group_size),
            "per_block": (self.ext.block_size, self.ext.block_size),
        }[self.scope]
        return Grid(self.number_format, block, self.symmetric)


class QConfig(_Strict):
    """The scheme of one linear; without `act` its input stays float."""

    weight: WeightSpec
    act: InputSpec | None = None

    def fitting(self, in_features: int) -> QConfig:
        """This scheme, or int8 per channel where groups do not divide `in_features`; inputs that
        no int8 weight goes with become int8 then too."""
        form = self.weight.number_format
        size = self.weight.ext.group_size if self.weight.scope == "per_group" else 1
        if in_features % size == 0 and (not form.group_size or in_features % form.unit == 0):
            return self
        act = self.act
        if act is not None and not act.number_format.is_integer:
            act = InputSpec(scope="per_token", dtype="int8")
        return QConfig(weight=WeightSpec(scope="per_channel", dtype="int8"), act=act)

    @model_validator(mode="after")
    def _has_a_product(self) -> QConfig:
        if self.act is None:
            return self
        if self.act.dtype not in INPUTS.get(self.weight.dtype, ()):
            known = " or ".join(("no inputs", *INPUTS.get(self.weight.dtype, ())))
            raise ValueError(f"act of {self.weight.dtype} weights is {known}, not {self.act.dtype}")
        if self.act.ext.max_error is not None and self.weight.dtype != "int8":
            raise ValueError("max_error leaves inputs float, which only an int8 weight goes with")
        if not self.weight.symmetric and self.weight.method != "qoq":
            raise ValueError("a weight with zero points goes without act: set symmetric to true")
        return self

    @property
    def max_error(self) -> float | None:
        """The share of its outputs by which rounding its inputs may move a linear; above it they
        stay float."""
        return self.act.ext.max_error if self.act else None

    @property
    def fitted(self) -> bool:
        """Whether codes or scales are made for the inputs that the linear sees."""
        return self.weight.method in ("gptq", "lwc") or (
            self.act is not None and self.act.scope == "per_tensor"
        )

    @property
    def calibrated(self) -> bool:
        """Whether the inputs of the linear must be seen."""
        return self.fitted or self.max_error is not None

    @property
    def with_float_inputs(self) -> QConfig:
        return QConfig(weight=self.weight)

    @property
    def name(self) -> str:
        """Such as W4A8."""
        inputs = 16 if self.act is None else self.act.number_format.bits
        form = self.weight.number_format
        kind = {"fp8_e4m3": "FP8 "}.get(form.name, f"{form.name.upper()} ")
        return f"{'' if form.is_integer else kind}W{form.bits}A{inputs}"


class LinearQuant(_Strict):
    """`type: linear_quant`: one scheme for the linears whose name a glob matches."""

    type: Literal["linear_quant"]
    qconfig: QConfig
    include: list[str] = ["*"]
    exclude: list[str] = []

    def scheme(self, module: str) -> QConfig | None:
        included = any(fnmatchcase(module, glob) for glob in self.include)
        excluded = any(fnmatchcase(module, glob) for glob in self.exclude)
        return self.qconfig if included and not excluded else None


class Group(_Strict):
    """`type: group`: several at once; the last that matches a linear wins, as in ModelSlim."""

    type: Literal["group"]
    configs: list[LinearQuant]

    def scheme(self, module: str) -> QConfig | None:
        found = [scheme for config in self.configs if (scheme := config.scheme(module))]
        return found[-1] if found else None


class Spec(BaseModel):
    """`spec`; ModelSlim's `runner`, `dataset` and `save` are its own business and are ignored."""

    model_config = ConfigDict(frozen=True)
    process: list[Annotated[LinearQuant | Group | FlexSmooth, Field(discriminator="type")]] = Field(
        min_length=1
    )


class Recipe(BaseModel):
    """A recipe; keys beside these, such as the anchors of a YAML file, are ignored."""

    model_config = ConfigDict(frozen=True)
    apiversion: Literal["modelslim_v1"] = "modelslim_v1"
    name: str = ""
    spec: Spec

    def scheme(self, module: str) -> QConfig | None:
        """Of the linear `module`, from the first process that matches it; None leaves it float."""
        found = (p.scheme(module) for p in self.spec.process if not isinstance(p, FlexSmooth))
        return next((scheme for scheme in found if scheme), None)

    @property
    def head_scheme(self) -> QConfig | None:
        """Of the head: a rule must name it, for msmodelslim's `*` is of the layers only."""
        return next((rule.qconfig for rule in self.rules if HEAD in rule.include), None)

    @property
    def rules(self) -> list[LinearQuant]:
        """Every `linear_quant`, alone or in a group."""
        process = [p for p in self.spec.process if not isinstance(p, FlexSmooth)]
        return [r for p in process for r in (p.configs if isinstance(p, Group) else [p])]

    @property
    def smoothing(self) -> FlexSmooth | None:
        return next((p for p in self.spec.process if isinstance(p, FlexSmooth)), None)


def built_in_names() -> list[str]:
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def read_recipe(name: str) -> Recipe:
    """The recipe of this package called `name`, or the YAML file at that path.

    Raises:
        RecipeError: there is no such recipe or file, or it asks for what this package cannot do.
    """
    path = BUILT_IN / f"{name}.yaml" if name in built_in_names() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        known = ", ".join(built_in_names())
        raise RecipeError(
            f"--recipe {name} is neither one of {known} nor a readable YAML file; pass one of these"
        ) from None
    return parse_recipe(text, path.stem if path.parent == BUILT_IN else str(name))


def parse_recipe(text: str, name: str) -> Recipe:
    """The recipe in YAML `text`; `name` is shown in errors and written into the checkpoint.

    Raises:
        RecipeError: no YAML, or no recipe.
    """
    import yaml

    try:
        content: Any = yaml.safe_load(text)
        return Recipe.model_validate({**content, "name": name})
    except (yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"recipe {name} is no YAML mapping ({reason}); correct it") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RecipeError(
            f"recipe {name} has a wrong {place}: {first['msg']}; correct it"
        ) from None
