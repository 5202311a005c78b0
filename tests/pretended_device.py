"""A device that this machine lacks, pretended: tensors put there lie on the CPU, marked, and an
operation over a marked and an unmarked tensor fails as it would on the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
GET_DEVICE = torch.Tensor.device.__get__  # pyright: ignore[reportAttributeAccessIssue]
MOVES = {torch.Tensor.to, torch.Tensor.cpu}
# Those that make a tensor of their own inside C++, where the mark of their input is not seen.
MAKERS = {torch.nn.functional.one_hot}
BETWEEN_DEVICES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten._has_compatible_shallow_copy_type.default,
}


class MixedDevicesError(RuntimeError):
    pass


class Marks:
    """The storages that lie on the device. A weak reference keeps an address from being reused."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._storages

    def set(self, tensor: torch.Tensor, marked: bool) -> None:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            if not marked:
                self._storages.pop(storage._cdata, None)
            elif storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)


class _Operations(TorchDispatchMode):
    """Refuses mixtures; what comes of marked tensors is marked. As on a GPU, a number in a tensor
    without dimensions may lie on the CPU."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks, self.count = marks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        marked = [self.marks.has(tensor) for tensor in tensors]
        if any(marked) and func not in BETWEEN_DEVICES:
            self.count += 1
            for tensor, there in zip(tensors, marked, strict=True):
                if not there and tensor.dim():
                    raise MixedDevicesError(f"{func} has a tensor {list(tensor.shape)} of the CPU")
        result = func(*args, **(kwargs or {}))
        if any(marked) and func not in BETWEEN_DEVICES:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.marks.set(leaf, True)
        return result


class _Names(TorchFunctionMode):
    """Calls that name the device, and tensors that are asked where they lie."""

    def __init__(self, marks: Marks, device: torch.device) -> None:
        super().__init__()
        self.marks, self.device = marks, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == GET_DEVICE:
            return self.device if self.marks.has(args[0]) else func(*args)
        if func in MOVES:
            return self._move(func, *args, **kwargs)
        if func in MAKERS:
            result = func(self._move(torch.Tensor.cpu, args[0]), *args[1:], **kwargs)
            self.marks.set(result, self.marks.has(args[0]))
            return result
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        wanted = torch.device(kwargs["device"])
        there = wanted == self.device
        result = func(*args, **kwargs | {"device": CPU if there else wanted})
        if wanted.type != "meta":
            self.marks.set(result, there)
        return result

    def _move(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if func is torch.Tensor.cpu:
            args = (CPU,)
        wanted, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        there = self.marks.has(tensor)
        if wanted is not None and wanted.type != "meta" and (wanted == self.device) != there:
            tensor = tensor.clone()
            self.marks.set(tensor, not there)
        return tensor if dtype is None else tensor.to(dtype=dtype)


@contextmanager
def pretended(device: torch.device) -> Iterator[_Operations]:
    """Within it `device` can be named. Gives the mode that counts the operations there."""
    marks = Marks()
    with _Operations(marks) as operations, _Names(marks, device):
        yield operations
