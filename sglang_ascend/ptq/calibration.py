"""What a layer's linears saw of the calibration text, and the codes that follow from it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_ascend.ptq.layers import Layers
from sglang_ascend.quantization.formats import FORMATS
from sglang_ascend.quantization.qconfig import InputSpec, QConfig, input_rule
from sglang_ascend.quantization.solve import gptq, hqq, learned_clipping, qoq, rtn
from sglang_ascend.quantization.transforms.rotation import rotated
from sglang_ascend.quantization.weight import WEIGHT_ONLY, InputKind, InputRule, QuantizedWeight
from sglang_ascend.training.interface import run_chain
from sglang_ascend.training.targets.packs import packed
from sglang_ascend.training.targets.quantized import linears

CHAIN_STEPS = 3  # the MTP layer sees its own output from its second step on


class Inputs:
    """Records the inputs of the named linears of `module` while it is entered.

    Linears that read the same tensor, as query, key and value do, hold one.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._module, self._names = module, set(names)
        self._seen: dict[str, list[Tensor]] = defaultdict(list)

    def __enter__(self) -> Inputs:
        self._hooks = [
            linear.register_forward_pre_hook(self._hook(name))
            for name, linear in linears(self._module)
            if name in self._names
        ]
        return self

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: self._seen[name].append(inputs[0].flatten(0, -2))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def of(self, name: str) -> Tensor | None:
        """[rows, in]; None for an expert that no token reached."""
        return torch.cat(self._seen[name]) if self._seen[name] else None

    def reader(self, name: str) -> str:
        """The first linear that reads what `name` reads; serving fuses them into one."""
        if not self._seen[name]:
            return name
        tensor = self._seen[name][0].data_ptr()
        return next(
            n for n in self._seen if self._seen[n] and self._seen[n][0].data_ptr() == tensor
        )


def walked(
    layers: Layers, tokens: list[Tensor], wanted: Mapping[int, Collection[str]]
) -> Iterator[tuple[int, nn.Module, Inputs]]:
    """The layers that `wanted` names by number, each with the inputs of the linears named there.

    Behind the decoder layers comes the MTP layer's block, which sees some steps of its chain. Every
    layer reads what float layers make of `tokens`; those behind the last one that records, and text
    where none does, are not run.
    """
    last = max((number for number, names in wanted.items() if names), default=-1)
    packs = packed(tokens) if last >= 0 else []
    embedding = layers.embedding() if packs else torch.empty(0)
    states = [embedding[pack.tokens] for pack in packs]
    for number in range(layers.num_layers):
        if number > last:
            states, packs = [], []
        if number not in wanted and not packs:
            continue
        layer = layers.decoder(number)
        with Inputs(layer, wanted.get(number, ())) as inputs:
            states = [layers.run(layer, *rows) for rows in zip(states, packs, strict=True)]
        if number in wanted:
            yield number, layer, inputs
        del layer, inputs  # before the next is read
    if layers.num_layers in wanted:
        mtp, norm = layers.mtp(), layers.final_norm()
        with Inputs(mtp.block, wanted[layers.num_layers]) as inputs:
            for state, pack in zip(states, packs, strict=True):
                hidden = norm(state).split(pack.lengths)
                for rows, ids in zip(hidden, pack.tokens.split(pack.lengths), strict=True):
                    # Slots that see no padding in any step.
                    num_slots = len(ids) - CHAIN_STEPS
                    if num_slots > 0:
                        run_chain(mtp, rows[None], ids[None], embedding, CHAIN_STEPS, num_slots)
        yield layers.num_layers, mtp.block, inputs


def quantize_linear(linear: nn.Linear, scheme: QConfig, seen: Tensor | None) -> QuantizedWeight:
    """`linear` by `scheme`; `seen` [rows, in] are its inputs, if the scheme needs them.

    A linear that no calibration token reached is rounded to nearest.

    Raises:
        ValueError: a static input of a linear that was not reached.
    """
    rule = input_rule(scheme.act, seen)
    values = linear.weight
    if rule.rotated:
        values, seen = rotated(values), None if seen is None else rotated(seen)
    weight = _solved(values, scheme, seen, rule)
    # A static product adds its bias as an integer.
    return replace(weight, bias=linear.bias if rule.kind == InputKind.STATIC else None)


def _solved(
    weight: Tensor, scheme: QConfig, seen: Tensor | None, rule: InputRule
) -> QuantizedWeight:
    spec = scheme.weight
    grid, ext = spec.grid, spec.ext
    if spec.method == "mse":
        return rtn(weight, grid, rule, torch.ones(weight.shape[1], dtype=torch.float64))
    if spec.method == "hqq":
        return hqq(weight, grid, rule)
    if spec.method == "qoq":  # inputs in int8 are multiplied with what it expands to
        return qoq(weight, ext.group_size, rule)[rule != WEIGHT_ONLY]
    if spec.method == "minmax" or seen is None:
        return rtn(weight, grid, rule)
    inputs = seen.double()
    hessian = inputs.T @ inputs
    if spec.method == "lwc":
        return learned_clipping(weight, hessian, grid, rule)
    return gptq(weight, hessian, grid, rule, ext.damping, ext.act_order, ext.scale_search)


def float_inputs(module: nn.Module, schemes: Mapping[str, QConfig], inputs: Inputs) -> set[str]:
    """The linears of `module` whose inputs stay float, for rounding them costs more than `schemes`
    allow. What serving fuses is decided as one: linears that read the same tensor, and the experts
    of a layer.
    """
    squares: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    reader: dict[str, str] = {}
    limited = {name: linear for name, linear in linears(module) if name in schemes}
    for name, linear in limited.items():
        act, seen = schemes[name].act, inputs.of(name)
        if act is None or act.ext.max_error is None or seen is None:
            continue
        errors = rounding_errors(linear, seen, act)
        squares[_of_all_experts(name)] += torch.stack([errors.sum(), torch.tensor(len(errors))])
        reader[_of_all_experts(name)] = _of_all_experts(inputs.reader(name))
    too_large = {
        reader[_of_all_experts(name)]
        for name in limited
        if (total := squares.get(_of_all_experts(name))) is not None
        and total[0] / total[1] > (schemes[name].max_error or torch.inf)
    }
    return {
        name
        for name in limited
        if schemes[name].max_error and reader.get(_of_all_experts(name)) in too_large
    }


def rounding_errors(linear: nn.Linear, seen: Tensor, act: InputSpec) -> Tensor:
    """float64 [rows]: |(q(x) - x) W^T|^2 / |x W^T|^2 of each row x of `seen`, per token scaled."""
    form = FORMATS[act.dtype]
    scale = seen.abs().amax(-1, keepdim=True) / form.maximum
    scale = torch.where(scale > 0, scale, 1.0)
    error = form.decode(form.encode(seen / scale)) * scale - seen
    moved, outputs = (F.linear(x, linear.weight).double() for x in (error, seen))
    return moved.square().sum(-1) / outputs.square().sum(-1).clamp_min(1e-30)


def _of_all_experts(name: str) -> str:
    return re.sub(r"\bexperts\.\d+\.", "experts.*.", name)
