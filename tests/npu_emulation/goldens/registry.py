"""The operators of torch_npu that the emulator computes, by name, with torch_npu's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any


class UnsupportedArgumentError(NotImplementedError):
    """A golden was given an argument that it does not compute with."""


GOLDENS: dict[str, Callable[..., Any]] = {}


def golden(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the definition of the operators `names` ("npu::npu_swiglu").

    It takes, under the schema's names, only the parameters it computes with: never `out`.
    It returns what the operator returns, with None for a result that is undefined.
    """

    def register(definition: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            GOLDENS[name] = definition
        return definition

    return register


def bind_golden(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """The definition with the arguments of a call of `schema`'s operator.

    Raises UnsupportedArgumentError for an argument other than its default that is not taken.
    """
    definition = GOLDENS[schema.name]
    taken = inspect.signature(definition).parameters
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    given |= kwargs
    for argument in schema.arguments:
        name = argument.name
        if name in taken or name in ("out", "workspace") or name not in given:
            continue
        if given[name] is not None and given[name] != argument.default_value:
            raise UnsupportedArgumentError(
                f"{schema.name} with {name}={given[name]!r} is not emulated: "
                "extend its definition in goldens/."
            )
    return partial(definition, **{name: given[name] for name in taken if name in given})
