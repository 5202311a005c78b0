"""Recipes: which linear gets which scheme, in the vocabulary of ModelSlim's YAML files."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_ascend.quantization.qconfig import QConfig
from sglang_ascend.quantization.transforms.process import FlexSmooth
from sglang_ascend.quantization.weight import HEAD

BUILT_IN = Path(__file__).parent / "recipes"


class RecipeError(ValueError):
    """One sentence that names the recipe, what is wrong in it and the remedy."""


class LinearQuant(BaseModel):
    """`type: linear_quant`: one scheme for the linears whose name a glob matches."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["linear_quant"]
    qconfig: QConfig
    include: list[str] = ["*"]
    exclude: list[str] = []

    def scheme(self, module: str) -> QConfig | None:
        included = any(fnmatchcase(module, glob) for glob in self.include)
        excluded = any(fnmatchcase(module, glob) for glob in self.exclude)
        return self.qconfig if included and not excluded else None


class Group(BaseModel):
    """`type: group`: several at once; the last that matches a linear wins, as in ModelSlim."""

    model_config = ConfigDict(extra="forbid", frozen=True)
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

    @model_validator(mode="after")
    def _smooths_or_rotates(self) -> Recipe:
        acts = [rule.qconfig.act for rule in self.rules]
        if self.smoothing and any(act is not None and act.ext.rotation for act in acts):
            raise ValueError("smoothed inputs are not rotated too: leave out one of the two")
        if sum(isinstance(p, FlexSmooth) for p in self.spec.process) > 1:
            raise ValueError("there is one flex_smooth_quant: name all its pairs there")
        return self

    def scheme(self, module: str) -> QConfig | None:
        """Of the linear `module`, from the first process that matches it; None leaves it float."""
        found = (p.scheme(module) for p in self.spec.process if not isinstance(p, FlexSmooth))
        return next((scheme for scheme in found if scheme), None)

    @property
    def head_scheme(self) -> QConfig | None:
        """Of the head: a rule must name it, for msmodelslim's `*` is of the layers only. As of
        other linears, the first process that does decides, and the last rule of a group."""
        named = ([r for r in rules if HEAD in r.include] for rules in self._processes)
        found = (rules[-1].scheme(HEAD) for rules in named if rules)
        return next((scheme for scheme in found if scheme), None)

    @property
    def _processes(self) -> list[list[LinearQuant]]:
        """The rules of each process that is no smoothing."""
        process = [p for p in self.spec.process if not isinstance(p, FlexSmooth)]
        return [p.configs if isinstance(p, Group) else [p] for p in process]

    @property
    def rules(self) -> list[LinearQuant]:
        """Every `linear_quant`, alone or in a group."""
        return [rule for rules in self._processes for rule in rules]

    def idle(self, modules: Sequence[str]) -> tuple[str, ...]:
        """What did nothing to the linears `modules` and the head: of each part that matches none or
        whose linears are all another's, its `include`. Of a user's recipe also every other glob
        that matches none; a built-in one has globs of every family."""
        schemes, found = [*map(self.scheme, modules), self.head_scheme], []
        is_own = self.name not in built_in_names()
        for rule in self.rules:
            globs, named = ", ".join(rule.include), [HEAD] if HEAD in rule.include else []
            if not any(rule.scheme(module) for module in [*modules, *named]):
                found.append(f"no linear matches {globs}")
            elif not any(scheme is rule.qconfig for scheme in schemes):
                found.append(f"another part decides every linear that matches {globs}")
            elif is_own:
                found += _matching_none(rule, [*modules, HEAD])
        if self.smoothing is not None and is_own:
            found += _matching_none(self.smoothing, modules)
        return tuple(found)

    @property
    def smoothing(self) -> FlexSmooth | None:
        return next((p for p in self.spec.process if isinstance(p, FlexSmooth)), None)


def _matching_none(part: LinearQuant | FlexSmooth, names: Sequence[str]) -> list[str]:
    return [
        f"no linear matches {glob} of {where}"
        for where, globs in (("include", part.include), ("exclude", part.exclude))
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in names)
    ]


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


def _refuse_repeated(root: Any, name: str) -> None:
    """Of a key that is twice in one mapping YAML would keep the last in silence.

    Raises:
        RecipeError: naming the first of them.
    """
    nodes, seen = [root], set()  # an anchor's node is there once, wherever it is named
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        pairs = [pair for pair in node.value if isinstance(pair, tuple)]
        keys = [key.value for key, _ in pairs if isinstance(key.value, str) and key.value != "<<"]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise RecipeError(
                f"recipe {name} has {twice[0]} twice in the mapping at line "
                f"{node.start_mark.line + 1}; make one of the two"
            )
        nodes += [value for _, value in pairs] or node.value


def parse_recipe(text: str, name: str) -> Recipe:
    """The recipe in YAML `text`; `name` is shown in errors and written into the checkpoint.

    Raises:
        RecipeError: no YAML, or no recipe.
    """
    import yaml

    try:
        if (root := yaml.compose(text, yaml.SafeLoader)) is not None:
            _refuse_repeated(root, name)
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
