"""Numbers for the emulated NPU: each operator is dispatched to the real torch_npu, whose calls are
counted, and a closure that computes it on the CPU is queued on the stream it was launched on."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from torch_npu.npu.graphs import _GraphDispatchMode

from npu_emulation import collectives  # noqa: F401  (what ranks exchange)
from npu_emulation.device_work import (
    alias,
    copies_on_device_skipped,
    enqueue,
    finish_stream,
    is_capturing,
    poison,
    poison_host,
    raise_failures,
)
from npu_emulation.goldens import GOLDENS, bind_golden
from sglang_ascend.ops.npu import CONSTRAINTS, CallRefused

# Allocation, bookkeeping and `.item()`: torch_npu does all of it on the host or with copies.
DONE_BY_TORCH_NPU = set(
    """aten::empty aten::empty_strided aten::empty_like aten::new_empty aten::new_empty_strided
    aten::record_stream aten::is_pinned aten::_pin_memory aten::pin_memory aten::set_ aten::resize_
    aten::detach aten::lift_fresh aten::alias aten::is_same_size aten::_local_scalar_dense
    npu::empty_with_format""".split()
)
# What torch_npu's documentation excludes and CANN takes, as SGLang's prefill has it: its inputs are
# defined AutoContiguous (CANN 8.5.0, fused_infer_attention_score_def.cpp).
TAKEN_BY_CANN = {"query, key and value are contiguous"}
OF_OUT = ("out", "workspace")  # what the overloads that write into a tensor add to a schema
PREPARATIONS = ("_get_max_workspace", "_infer_output")  # of what a graph captures
# Computed, and not dispatched to torch_npu: every format is stored as ND here, and only named.
NOT_DISPATCHED = {"npu::npu_format_cast"}
ND = 2
# SGLang's own are Python functions, which call torch_npu's operators.
COMPOSED, ON_NPU = "sglang::", torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
NAMESPACES_WITHOUT_KERNELS = ("c10d::", "_c10d", "prim::", "profiler::")


class EmulationError(RuntimeError):
    """An operator that the emulator cannot compute, or whose golden contradicts torch_npu."""


def _only_looks_like_a_view(func: Any) -> bool:
    """Composites such as `to` and `contiguous`, which inference mode hands on as they are."""
    return func.is_view and func._can_decompose()


def _is_npu(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "npu"
    return isinstance(value, torch.device) and value.type == "npu"


class Numerics(TorchDispatchMode):
    """While active in a thread, `npu` tensors have the values that a device would give them.

    `computed` counts operators; `not_counted` those that torch_npu cannot launch without CANN.
    With `checks` a call that the documentation excludes raises CallRefused; `unchecked` are the
    operators of torch_npu that no constraints are known of.
    """

    def __init__(self, checks: bool = False) -> None:
        super().__init__()
        self.checks = checks
        self.unchecked: set[str] = set()
        self.computed: Counter[str] = Counter()
        self.not_counted: Counter[str] = Counter()
        self.formats = WeakTensorKeyDictionary()

    def __enter__(self) -> Numerics:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        leaves = tree_leaves((args, kwargs))
        raise_failures()
        if not any(map(_is_npu, leaves)) or name.startswith(NAMESPACES_WITHOUT_KERNELS):
            return func(*args, **kwargs)
        if _only_looks_like_a_view(func):
            with self:
                return func.decompose(*args, **kwargs)
        if name.startswith(COMPOSED):
            with self:
                return func.redispatch(ON_NPU, *args, **kwargs)
        if name in DONE_BY_TORCH_NPU or func.is_view or name.endswith(PREPARATIONS):
            result = func(*args, **kwargs)
            raise_failures()
            return result
        if name == "npu::get_npu_format":
            return self.formats.get(args[0], ND)
        if self.checks and name.startswith("npu::"):
            self._check(name.removeprefix("npu::"), args, kwargs)
        self.computed[name] += 1
        if name in ("aten::copy_", "aten::_to_copy") and not all(map(_is_npu, _places(leaves))):
            return _transfer(func, args, kwargs)
        if _has_shape_of_values(func, leaves):
            self._dispatch(func, args, kwargs)
            return self._compute_at_once(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _check(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """As CheckedCalls, which does not see what an operator in Python calls."""
        if name not in CONSTRAINTS:
            self.unchecked.add(name)
            return
        given = {key: value for key, value in kwargs.items() if key not in OF_OUT}
        call = CONSTRAINTS[name].bind(args, given)
        rules = (rule for rule in CONSTRAINTS[name].rules if rule.says not in TAKEN_BY_CANN)
        with self:  # which knows storage formats
            broken = next((rule for rule in rules if not rule.holds(call)), None)
        if broken:
            raise CallRefused(f"{name}: {broken.says} ({broken.source}).")

    def _compute(self, func, args, kwargs) -> Any:
        call = _on_cpu(func, args, kwargs)
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        try:
            result = self._dispatch(func, args, kwargs)
        except EmulationError:
            if any(returned.alias_info is None for returned in func._schema.returns):
                return self._compute_at_once(func, args, kwargs)
            result = _written_arguments(func, args, kwargs)
        places = [alias(leaf) for leaf in tree_leaves(result)]
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and _memory(leaf) not in given and not is_capturing():
                poison(leaf)

        def closure() -> None:
            try:
                _write(func, places, tree_leaves(call()))
            except Exception as error:
                error.add_note(f"while the emulated NPU computed {func}")
                raise

        enqueue(closure)
        return result

    def _compute_at_once(self, func, args, kwargs) -> Any:
        """A result whose shape torch_npu has to wait for, or cannot tell without CANN."""
        if is_capturing():
            raise EmulationError(
                f"{func} has a shape that depends on values: it cannot be captured."
            )
        call = _on_cpu(func, args, kwargs)
        finish_stream()
        result = tree_map(_on_npu, call())
        if func._schema.name == "npu::npu_format_cast":
            self.formats[result] = args[1]
        return result

    def _dispatch(self, func, args, kwargs) -> Any:
        """torch_npu's own result, of which only place, shape and type are of use."""
        name = func._schema.name
        if name in NOT_DISPATCHED:
            raise EmulationError(name)
        with copies_on_device_skipped():
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if not name.startswith("atb::"):
                    raise
                self.not_counted[name] += 1
                raise EmulationError(f"{name} is not emulated: {error}") from error


_active: list[Numerics] = []  # in any thread
_update = _GraphDispatchMode.update_capture_record


def _update_with_numbers(records: _GraphDispatchMode, cpu_update_input: list[dict]) -> None:
    """NPUGraph.update, which a server calls in a thread of its own, where no mode is active."""
    here = _get_current_dispatch_mode_stack()
    if not _active or any(isinstance(mode, Numerics) for mode in here):
        _update(records, cpu_update_input)
        return
    with Numerics():
        _update(records, cpu_update_input)


_GraphDispatchMode.update_capture_record = _update_with_numbers


def _has_shape_of_values(func, leaves: list[Any]) -> bool:
    """Whether the result's shape depends on values. An index by integers is tagged so in vain."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    masks = (torch.bool, torch.uint8)
    is_index = func._schema.name == "aten::index"
    return not is_index or any(_is_tensor(leaf) and leaf.dtype in masks for leaf in leaves[1:])


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | torch.device)]


def _written_arguments(func, args, kwargs) -> Any:
    """What an operator returns that only writes into its arguments."""
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written.append(value)
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _on_npu(value: Any) -> Any:
    if not _is_tensor(value):
        return value
    placed = torch.empty(value.shape, dtype=value.dtype, device="npu")
    alias(placed).copy_(value)
    return placed


def _cpu_argument(value: Any) -> Any:
    """An argument for the CPU: the device's is read when the work runs, the host's now."""
    if isinstance(value, torch.Tensor):
        return alias(value) if _is_npu(value) else value.detach().clone()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    return value


def _on_cpu(func, args, kwargs):
    """A function without arguments that computes the operator over the device's memory."""
    name = func._schema.name
    if name not in GOLDENS and name.startswith(("npu::", "atb::")):
        raise EmulationError(f"{name} is not emulated: define it in goldens/ ({func._schema}).")
    cpu_args, cpu_kwargs = tree_map(_cpu_argument, (args, kwargs))
    if cpu_kwargs.get("pin_memory"):
        cpu_kwargs["pin_memory"] = False
    if name == "aten::_to_copy" and cpu_kwargs.get("dtype") is torch.float64:
        cpu_kwargs["dtype"] = torch.float32  # as torch_npu casts, which logs a warning
    if name in GOLDENS:
        compute = bind_golden(func._schema, cpu_args, cpu_kwargs)
    else:
        compute = partial(func, *cpu_args, **cpu_kwargs)
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return compute
    seed = int(torch.randint(2**62, ()))  # drawn now, in the program's order, whenever it runs

    def random() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return compute()

    return random


def _write(func, places: list[Any], values: list[Any]) -> None:
    if len(places) != len(values):
        raise EmulationError(f"{func} has {len(places)} results and its golden {len(values)}.")
    for place, value in zip(places, values, strict=True):
        if not _is_tensor(value) or not _is_tensor(place):
            continue
        if place.shape != value.shape or place.dtype != value.dtype:
            raise EmulationError(
                f"{func} gives {tuple(place.shape)} {place.dtype} in torch_npu and "
                f"{tuple(value.shape)} {value.dtype} here."
            )
        if place.data_ptr() != value.data_ptr() or place.stride() != value.stride():
            place.copy_(value)


def _transfer(func, args, kwargs) -> Any:
    """Between host and device. Bytes that torch_npu moves as they are, the runtime moves; where its
    kernels cast or rearrange, the result is written here, at the same place of the stream."""
    result = func(*args, **kwargs)
    target, source = result, args[1] if func._schema.name == "aten::copy_" else args[0]
    raise_failures()
    if _moves_bytes(target, source):
        return result
    waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
    to_device = _is_npu(target)
    host = source if to_device else target
    place, value = alias(target), alias(source)
    if to_device and (waits or not host.is_pinned()):
        value = source.detach().clone()
    if not to_device and not waits:
        poison_host(place)

    def closure() -> None:
        place.copy_(value)

    enqueue(closure)
    if not to_device and waits:
        finish_stream()
    return result


def _moves_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
    )
