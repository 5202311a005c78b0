"""Chooses one implementation per (operator, device type), once, and says which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

REFERENCE = "reference"
CPU = frozenset({"cpu"})  # the one device of some bodies


@dataclass(frozen=True)
class Implementation:
    """One body of an operator. ``devices`` is empty when it runs on any device.

    ``accepts`` takes a call's arguments and says whether they have the dtypes and layouts that
    the body is written for.
    """

    name: str
    function: Callable[..., Any]
    devices: frozenset[str] = frozenset()
    available: Callable[[], bool] = lambda: True
    accepts: Callable[..., bool] = lambda *args, **kwargs: True

    def serves(self, device_type: str) -> bool:
        return (not self.devices or device_type in self.devices) and self.available()


@lru_cache
def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def imported_at_call(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called."""

    @cache
    def function() -> Callable[..., Any]:
        return getattr(import_module(module), name)

    return lambda *args, **kwargs: function()(*args, **kwargs)


def numba_body(
    module: str, name: str, accepts: str = "", available: Callable[[], bool] = lambda: True
) -> Implementation:
    """A body compiled for the CPU, where Numba is installed: function ``name`` of ``module``.

    The module is imported when the operator is first called, for importing Numba takes a second.
    ``accepts`` names the function there that says which calls it takes, if not all; ``available``
    says what else it needs.
    """
    options = {"accepts": imported_at_call(module, accepts)} if accepts else {}
    function = imported_at_call(module, name)

    def is_available() -> bool:
        return is_installed("numba") and available()

    return Implementation("numba", function, CPU, is_available, **options)


def triton_body(function: Callable[..., Any], accepts: Callable[..., bool]) -> Implementation:
    """A body that launches Triton kernels; ``accepts`` says which layouts their raw pointers suit.

    triton-ascend reads what a mask excludes, unless the mask is a run of places: a kernel that
    would leave its tensors by that is not for the NPU.
    """
    devices = frozenset({"cuda", "npu"})
    return Implementation("triton", function, devices, lambda: is_installed("triton"), accepts)


def torch_body(function: Callable[..., Any]) -> Implementation:
    """A faster body than the reference by PyTorch alone, for any device and every call."""
    return Implementation("torch", function)


def npu_body(function: Callable[..., Any], **options: Any) -> Implementation:
    """A body over torch_npu; it does not synchronise and takes no host lists, unless it says so."""
    return Implementation(
        "npu", function, frozenset({"npu"}), lambda: is_installed("torch_npu"), **options
    )


class Op:
    """An operator: its reference is the definition, implementations are chosen by filter.

    A call goes to the body for its device, what that one declines to the body for any device, and
    the rest to the reference. Two bodies that both serve a device are an error, not a preference:
    say which one by narrowing ``devices`` or ``available``. A test may call
    ``implementation(name)`` directly.
    """

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name = name
        self._implementations = {REFERENCE: Implementation(REFERENCE, reference)}
        self._bodies: dict[str, tuple[Implementation, ...]] = {}
        if name in OPS:
            raise ValueError(f"operator {name!r} is defined twice; operators are defined once.")
        OPS[name] = self

    def register(self, implementation: Implementation) -> None:
        if implementation.name in self._implementations:
            raise ValueError(f"{self.name} already has an implementation {implementation.name!r}.")
        self._implementations[implementation.name] = implementation
        self._bodies.clear()

    def implementation(self, name: str) -> Callable[..., Any]:
        return self._implementations[name].function

    def bodies(self, device_type: str) -> tuple[Implementation, ...]:
        """What serves ``device_type`` ("cpu", "cuda", "npu"), in the order of asking; cached."""
        if device_type not in self._bodies:
            others = [body for body in self._implementations.values() if body.name != REFERENCE]
            found = []
            for is_special in (True, False):
                serving = [
                    body
                    for body in others
                    if bool(body.devices) == is_special and body.serves(device_type)
                ]
                if len(serving) > 1:
                    names = ", ".join(body.name for body in serving)
                    raise RuntimeError(
                        f"{self.name} on {device_type} is ambiguous between {names}."
                    )
                found += serving
            self._bodies[device_type] = (*found, self._implementations[REFERENCE])
        return self._bodies[device_type]

    def choose(self, device_type: str) -> Implementation:
        """The one of ``bodies`` that is asked first."""
        return self.bodies(device_type)[0]

    def body_of(self, tensor: Any, *args: Any, **kwargs: Any) -> Implementation:
        """What a call with these arguments runs, on the device of the first tensor."""
        for body in self.bodies(tensor.device.type):
            if body.accepts(tensor, *args, **kwargs):
                return body
        raise AssertionError("the reference accepts every call")

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self.body_of(tensor, *args, **kwargs).function(tensor, *args, **kwargs)


OPS: dict[str, Op] = {}


def load_operators() -> None:
    """Fills ``OPS`` by importing every package beside this file."""
    folder, package = Path(__file__).parent, __name__.rpartition(".")[0]
    for module in iter_modules([str(folder)]):
        if module.ispkg:
            import_module(f"{package}.{module.name}")
