"""What every layout of a quantized checkpoint has in common: schemes, and checks of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.reader import PLAIN_FLOATS, TensorEntry
from sglang_ascend.quantization.formats import NumberFormat
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputRule, QuantizedWeight

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Scheme:
    """How one module is quantized, as far as names and settings tell.

    Attributes:
        name: as a table shows it.
        number_format: of the weight's codes.
        input_rule: None for a static one, whose scale is a tensor.
        required, optional: suffixes of the module's tensors.
        group_size: input columns that one scale covers; None is all, or a block's.
    """

    name: str
    number_format: NumberFormat
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    input_rule: InputRule | None = WEIGHT_ONLY
    group_size: int | None = None

    @property
    def suffixes(self) -> tuple[str, ...]:
        return self.required + self.optional


class ModuleTensors:
    """The tensors of one module by suffix; each is checked when it is taken."""

    def __init__(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        self.module = module
        self._tensors = tensors

    def take(self, suffix: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> Tensor:
        """The tensor, if it has one of `dtypes` and `shape`; None in a shape is any size but 0.

        Raises:
            CheckpointError: it is missing or another.
        """
        tensor = self._tensors.get(suffix)
        if tensor is None:
            raise CheckpointError(
                f"{self.named(suffix)} is missing; copy or download the complete checkpoint again"
            )
        if tensor.dtype not in dtypes:
            expected = " or ".join(_dtype_name(dtype) for dtype in dtypes)
            raise self.error(suffix, f"is {_dtype_name(tensor.dtype)} and should be {expected}")
        if tensor.dim() != len(shape) or any(
            expected not in (None, size) for expected, size in zip(shape, tensor.shape, strict=True)
        ):
            expected = str(["any" if size is None else size for size in shape]).replace("'", "")
            raise self.error(suffix, f"has the shape {list(tensor.shape)} and should be {expected}")
        if tensor.numel() == 0:
            raise self.error(suffix, f"has the shape {list(tensor.shape)}, which holds nothing")
        return tensor

    def codes(self, suffix: str, number_format: NumberFormat) -> Tensor:
        """Codes [out, in] that are not packed.

        Raises:
            CheckpointError: they are missing, of another dtype, or no numbers of `number_format`.
        """
        codes = self.take(suffix, (number_format.dtype,), None, None)
        if not number_format.holds(codes):
            raise self.error(suffix, f"holds codes that are no {number_format.name}")
        return codes

    def has(self, suffix: str) -> bool:
        return suffix in self._tensors

    def scale(self, suffix: str, *shape: int | None) -> Tensor:
        """A scale as float32.

        Raises:
            CheckpointError: it is missing, of another shape, not finite or not above 0.
        """
        return self.positive(suffix, self.take(suffix, FLOATS, *shape).to(torch.float32))

    def positive(self, suffix: str, scale: Tensor) -> Tensor:
        """`scale`, once it is sure that it is one.

        Raises:
            CheckpointError: not finite or not above 0.
        """
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise self.error(suffix, "holds a scale that is not a finite number above 0")
        return scale

    def finite(self, suffix: str, *shape: int | None) -> Tensor:
        """A float tensor as float32.

        Raises:
            CheckpointError: it is missing, of another shape or not finite.
        """
        values = self.take(suffix, FLOATS, *shape).to(torch.float32)
        if not bool(values.isfinite().all()):
            raise self.error(suffix, "holds NaN or infinity")
        return values

    def zero(self, suffix: str, *shape: int | None) -> Tensor | None:
        """A float zero point as float32, or None where all are 0."""
        values = self.finite(suffix, *shape)
        return values if bool(values.any()) else None

    def named(self, suffix: str) -> str:
        return shown(f"{self.module}.{suffix}")

    def error(self, suffix: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.named(suffix)} {problem}; quantize the model again or copy the checkpoint again"
        )


class Layout:
    """One kind of checkpoint; this one is the float checkpoint, in which nothing is quantized.

    A layout knows settings and headers. `scheme` and `read` are functions of one module, so that a
    loader may ask in its own order and hold one module in memory.
    """

    name: ClassVar[str] = "float"

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self.entries = entries

    def scheme(self, module: str) -> Scheme | None:
        """How `module` is quantized; None means that its weight is float.

        Raises:
            CheckpointError: the scheme is unknown, or a tensor that it needs is missing.
        """
        return None

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight of `module` from its whole `tensors`, by suffix; changes none of them.

        Raises:
            CheckpointError: a tensor that contradicts the module's scheme.
        """
        raise CheckpointError(f"{shown(module)} is not quantized; read its weight as it is")

    def schemes(self) -> dict[str, Scheme]:
        """Every quantized module of the checkpoint, in the order of its tensors.

        Raises:
            CheckpointError: as `scheme`, and a tensor of codes that no scheme explains.
        """
        modules = dict.fromkeys(name.rpartition(".")[0] for name in self.entries)
        found = {module: scheme for module in modules if (scheme := self.scheme(module))}
        claimed = {f"{module}.{suffix}" for module, s in found.items() for suffix in s.suffixes}
        for name, entry in self.entries.items():
            if name not in claimed and self._is_unexplained(entry):
                raise CheckpointError(
                    f"{shown(entry.file)} holds {shown(name)} as {entry.dtype} although the "
                    f"checkpoint's settings ({self.name}) say that it is float; "
                    "restore the settings it was written with, or export it as BF16, F16 or F32"
                )
        return found

    def _is_unexplained(self, entry: TensorEntry) -> bool:
        return entry.dtype not in PLAIN_FLOATS and len(entry.shape) > 1

    def is_own(self, name: str) -> bool:
        """Whether the float tensor `name` has a meaning in this layout only."""
        return False

    def holds(self, module: str, suffix: str) -> bool:
        return f"{module}.{suffix}" in self.entries

    def _complete(self, module: str, scheme: Scheme) -> Scheme:
        """`scheme`, once it is sure that every tensor it requires is there."""
        for suffix in scheme.required:
            if not self.holds(module, suffix):
                raise CheckpointError(
                    f"{shown(f'{module}.{suffix}')} is missing although {shown(module)} is "
                    f"{shown(scheme.name)}; copy or download the complete checkpoint again"
                )
        return scheme


class UniformLayout(Layout):
    """All quantized modules have one scheme: those that have any of its tensors."""

    _scheme: Scheme

    def scheme(self, module: str) -> Scheme | None:
        if not any(self.holds(module, suffix) for suffix in self._scheme.suffixes):
            return None
        return self._complete(module, self._scheme)


class SettingError(CheckpointError):
    """A setting of quantization_config that cannot be read."""

    def __init__(self, name: str, value: Any, expected: str) -> None:
        super().__init__(
            f"config.json has {shown(name)} = {shown(value)} in its quantization_config where "
            f"{expected} is known; convert the checkpoint with the tool that wrote it"
        )


def integer_setting(settings: Mapping[str, Any], name: str, *allowed: int) -> int:
    """An integer of quantization_config: one of `allowed`, or any above 0 or -1 if there are none.

    Raises:
        SettingError: it is missing, no integer or not allowed.
    """
    value = settings.get(name)
    if (
        type(value) is not int
        or not (0 < value < 2**31 or value == -1)
        or (allowed and value not in allowed)
    ):
        expected = " or ".join(map(str, allowed)) if allowed else "an integer above 0, or -1,"
        raise SettingError(name, value, expected)
    return value


def block_setting(settings: Mapping[str, Any], name: str) -> tuple[int, int]:
    """The rows and columns of a block.

    Raises:
        SettingError: it is missing, or no list of two integers above 0.
    """
    block = settings.get(name)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and 0 < size < 2**31 for size in block)
    ):
        raise SettingError(name, block, "a list of two integers above 0")
    return block[0], block[1]


def spread_groups(num_columns: int, group_size: int | None) -> int:
    """How many groups `num_columns` make; None is one of all."""
    return 1 if group_size is None else -(-num_columns // group_size)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
