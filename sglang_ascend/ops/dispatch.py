"""Chooses one implementation per (operator, device type), once, and says which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REFERENCE = "reference"


@dataclass(frozen=True)
class Implementation:
    """One body of an operator. ``devices`` is empty when it runs on any device.

    ``accepts`` takes a call's arguments and says whether they have the dtypes and layouts that
    the body is written for; the reference serves the calls that it declines.
    """

    name: str
    function: Callable[..., Any]
    devices: frozenset[str] = frozenset()
    available: Callable[[], bool] = lambda: True
    accepts: Callable[..., bool] = lambda *args, **kwargs: True

    def serves(self, device_type: str) -> bool:
        return (not self.devices or device_type in self.devices) and self.available()


class Op:
    """An operator: its reference is the definition, implementations are chosen by filter.

    Two implementations that both serve a device are an error, not a preference: say which one
    by narrowing ``devices`` or ``available``. A test may call ``implementation(name)`` directly.
    """

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name = name
        self._implementations = {REFERENCE: Implementation(REFERENCE, reference)}
        self._chosen: dict[str, Implementation] = {}
        if name in OPS:
            raise ValueError(f"operator {name!r} is defined twice; operators are defined once.")
        OPS[name] = self

    def register(self, implementation: Implementation) -> None:
        if implementation.name in self._implementations:
            raise ValueError(f"{self.name} already has an implementation {implementation.name!r}.")
        self._implementations[implementation.name] = implementation
        self._chosen.clear()

    def implementation(self, name: str) -> Callable[..., Any]:
        return self._implementations[name].function

    def choose(self, device_type: str) -> Implementation:
        """The implementation for ``device_type`` ("cpu", "cuda", "npu"); cached."""
        if device_type not in self._chosen:
            special = [
                candidate
                for candidate in self._implementations.values()
                if candidate.name != REFERENCE and candidate.serves(device_type)
            ]
            if len(special) > 1:
                names = ", ".join(candidate.name for candidate in special)
                raise RuntimeError(f"{self.name} on {device_type} is ambiguous between {names}.")
            self._chosen[device_type] = (special or [self._implementations[REFERENCE]])[0]
        return self._chosen[device_type]

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs on the device of the first tensor."""
        chosen = self.choose(tensor.device.type)
        if not chosen.accepts(tensor, *args, **kwargs):
            chosen = self._implementations[REFERENCE]
        return chosen.function(tensor, *args, **kwargs)


OPS: dict[str, Op] = {}
