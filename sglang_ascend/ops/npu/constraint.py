"""The form of a constraints: an operator's schema and the rules that its documentation states."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

import torch

DOCS = "torch_npu 2.13.0, _op_plugin_docs.py"
FLOATS = (torch.float16, torch.bfloat16)
FLOATS_AND_FP32 = (*FLOATS, torch.float32)
FRACTAL_NZ = 29  # the storage format of tiles of 16 x 32 bytes


@dataclass(frozen=True)
class Rule:
    """One sentence of an operator's documentation.

    ``line`` of torch_npu's docs contains ``quote``; where they lack the operator ``line`` is 0 and
    ``quote`` names the document. ``holds`` takes the call: every argument of the schema by name,
    defaults filled in.
    """

    says: str
    line: int
    quote: str
    holds: Callable[[Any], bool]

    @property
    def source(self) -> str:
        return f"{DOCS}:{self.line}" if self.line else self.quote


@dataclass(frozen=True)
class Constraints:
    """An operator of torch_npu, and what it asks beyond its schema.

    A Meta kernel checks names, types and output shapes; what is here the device would refuse, or
    read wrongly.
    """

    name: str
    rules: tuple[Rule, ...]

    @property
    def schema(self) -> str:
        """As torch_npu 2.13.0 and 2.10.0.post7 register it."""
        return _schemas()[self.name]

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> SimpleNamespace:
        """The call's arguments by name. Raises TypeError where the schema does not take them."""
        parameters = torch._C.parse_schema(self.schema).arguments
        positional = [parameter for parameter in parameters if not parameter.kwarg_only]
        if len(args) > len(positional):
            raise TypeError(f"{self.name} takes {len(positional)} positional arguments.")
        given = dict(zip((parameter.name for parameter in positional), args, strict=False))
        unknown = (kwargs.keys() - {parameter.name for parameter in parameters}) | (
            kwargs.keys() & given.keys()
        )
        if unknown:
            raise TypeError(f"{self.name} does not take {min(unknown)!r}, or takes it once.")
        given |= kwargs
        for parameter in parameters:
            if parameter.name not in given:
                if not parameter.has_default_value():
                    raise TypeError(f"{self.name} needs {parameter.name!r}.")
                given[parameter.name] = parameter.default_value
        return SimpleNamespace(**given)


@lru_cache(maxsize=1)
def _schemas() -> dict[str, str]:
    path = resources.files("sglang_ascend.ops.npu") / "schemas.json"
    return json.loads(path.read_text(encoding="utf-8"))


def rule(line: int, quote: str, says: str) -> Callable[[Callable[[Any], bool]], Rule]:
    """Makes a rule of a predicate."""
    return lambda holds: Rule(says, line, quote, holds)


def contiguous(*tensors: torch.Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def host_integers(values: Any) -> bool:
    """A list of numbers; a device tensor in its place is read element by element, each a wait."""
    return values is None or (
        not isinstance(values, torch.Tensor)
        and all(not isinstance(value, torch.Tensor) for value in values)
    )
