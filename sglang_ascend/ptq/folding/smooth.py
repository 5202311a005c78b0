"""FlexSmoothQuant over a model: scales of every pair, and the checkpoint that they are folded into.

No pair crosses a residual stream or a last norm. So the hidden states that the MTP layer and the
head read, the embedding, and the MTP layer's own norms and projection stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from sglang_ascend.ptq.calibration import Inputs, walked
from sglang_ascend.ptq.folding.folded import FoldedCheckpoint
from sglang_ascend.ptq.folding.pairs import Pair, pairs
from sglang_ascend.ptq.folding.side_file import Admitted
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.emulated import rounded_inputs
from sglang_ascend.quantization.qconfig import QConfig, input_rule
from sglang_ascend.quantization.transforms.process import FlexSmooth
from sglang_ascend.quantization.transforms.smoothing import Smoothing, search

SEARCH_ROWS = 512  # of the inputs, evenly drawn; extremes are of all of them

Schemes = list[dict[str, QConfig]]  # layer by layer, by the linears' names inside it


def smoothed_pairs(layers: Layers, schemes: Schemes, rule: FlexSmooth) -> dict[int, list[Pair]]:
    """By layer, the pairs of which `rule` asks for a reader that is quantized."""
    found = {}
    for number, known in enumerate(schemes):
        prefix, layer = layers.prefix(number), layers.skeleton(number)
        shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
        found[number] = [
            pair
            for pair in pairs(shapes, layers.target.model_config)
            if any(
                name in known and rule.smooths(pair.kind, prefix + name) for name in pair.readers
            )
        ]
    return {number: kept for number, kept in found.items() if kept}


def smoothings(
    layers: Layers,
    schemes: Schemes,
    rule: FlexSmooth,
    tokens: list[Tensor],
    progress: Callable[[str], object] = lambda name: None,
) -> dict[str, Smoothing]:
    """Scales of every pair, by its full name, for the outputs of its readers on `tokens`."""
    wanted, found = smoothed_pairs(layers, schemes, rule), {}
    readers = {n: [name for pair in of for name in pair.readers] for n, of in wanted.items()}
    for number, layer, inputs in walked(layers, tokens, readers):
        prefix = layers.prefix(number)
        for pair in wanted[number]:
            one = _searched(layer, pair, inputs, schemes[number], rule)
            if one is not None:
                found[prefix + pair.name] = one
        progress(prefix.removesuffix("."))
    return found


def _searched(
    layer: nn.Module, pair: Pair, inputs: Inputs, schemes: Mapping[str, QConfig], rule: FlexSmooth
) -> Smoothing | None:
    """None where no token reached the readers; the one that saw the most stands for all."""
    seen = [rows for name in pair.readers if (rows := inputs.of(name)) is not None]
    if not seen:
        return None
    rows = max(seen, key=len)
    scheme = next(schemes[name] for name in pair.readers if name in schemes)
    grid, extremes = scheme.weight.grid, torch.stack(rows.aminmax(dim=0))
    return search(
        rows[:: -(-len(rows) // SEARCH_ROWS)],
        torch.cat([layer.get_parameter(f"{name}.weight") for name in pair.readers]),
        lambda x, scale: rounded_inputs(x, input_rule(scheme.act, extremes / scale)),
        lambda weight: grid.rounded(weight, *grid.fit(weight)),
        groups=pair.rows,
        alpha=rule.alpha,
        beta=rule.beta,
        exact=bool(_float_matrices(pair, schemes)),
        largest=rows.abs().amax(0),
    )


def _float_matrices(pair: Pair, schemes: Collection[str]) -> list[str]:
    """The scaled matrices that stay float: scales that are no powers of two would round them."""
    matrices = [*pair.readers, *([pair.router] if pair.router else [])]
    if pair.kind != "norm-linear":
        matrices.append(pair.producer)
    return [name for name in matrices if name not in schemes]


def admitted(layers: Layers, schemes: Schemes, rule: FlexSmooth) -> dict[str, Admitted]:
    """By the full name of every pair, which saved scales may be folded."""
    return {
        layers.prefix(number) + pair.name: Admitted(
            len(pair.rows),
            tuple(layers.prefix(number) + n for n in _float_matrices(pair, schemes[number])),
        )
        for number, of in smoothed_pairs(layers, schemes, rule).items()
        for pair in of
    }


def folded(
    layers: Layers, schemes: Schemes, rule: FlexSmooth, scales: Mapping[str, Tensor]
) -> FoldedCheckpoint:
    """The checkpoint of `layers` with the scales of its pairs, by full name, folded in."""
    rows, columns = {}, {}
    for number, of in smoothed_pairs(layers, schemes, rule).items():
        prefix = layers.prefix(number)
        for pair in of:
            scale = scales.get(prefix + pair.name)
            if scale is None:
                continue
            source = layers.weights.checkpoint
            made = _producer_scale(source, prefix, pair, scale)
            for name in _tensors(source, prefix + pair.producer):
                rows[name] = 1 / made
            read = [*pair.readers, *([pair.router] if pair.router else [])]
            columns |= {f"{prefix}{name}.weight": made[pair.rows] for name in read}
    return FoldedCheckpoint.of(layers.weights.checkpoint, rows, columns)


def _tensors(source: Checkpoint, module: str) -> Iterator[str]:
    names = (f"{module}.weight", f"{module}.bias")
    return (name for name in names if name in source.entries)


def _producer_scale(source: Checkpoint, prefix: str, pair: Pair, scale: Tensor) -> Tensor:
    """float64: what each row of the producer is divided by. A norm's weight gets the values of its
    dtype that are nearest, and the scale is what that divides it by."""
    name = f"{prefix}{pair.producer}.weight"
    by_row = torch.ones(source.entries[name].shape[0], dtype=torch.float64)
    by_row[pair.rows] = scale.double()
    if pair.kind != "norm-linear":
        return by_row
    gain = source.tensor(name)
    divided = (gain.double() / by_row).to(gain.dtype).double()
    return torch.where(divided != 0, gain.double() / divided, torch.ones_like(by_row))
