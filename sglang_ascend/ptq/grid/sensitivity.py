"""Which linears have inputs that int8 harms, layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sglang_ascend import svg
from sglang_ascend.ptq.calibration import rounding_errors, walked
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.quantization.qconfig import InputSpec

INT8_PER_TOKEN = InputSpec(scope="per_token", dtype="int8")
COLORS = (svg.PLAIN, svg.MTP, *svg.OTHERS)
LAYER = re.compile(r"\.layers\.(\d+)\.")


@torch.inference_mode()
def sensitivity(
    layers: Layers, tokens: list[Tensor], wanted: Mapping[int, list[str]]
) -> dict[str, dict[str, float]]:
    """Of the linears of the layers in `wanted` that a token reached, two figures.

    `outliers`: max|x| of the largest channel beside that of the median one. `error`: of rounding x
    to int8 per token, |(q(x) - x) W^T|^2 / |x W^T|^2 as a mean over `tokens`.
    """
    found = {}
    for number, layer, inputs in walked(layers, tokens, wanted):
        for name in wanted[number]:
            linear, seen = layer.get_submodule(name), inputs.of(name)
            assert isinstance(linear, nn.Linear)
            if seen is not None:
                channels = seen.abs().amax(0)
                ratio = channels.max() / channels.median().clamp_min(1e-30)
                error = rounding_errors(linear, seen, INT8_PER_TOKEN).mean()
                figures = {"outliers": float(ratio), "error": float(error)}
                found[layers.prefix(number) + name] = figures
    return found


def drawing(model: str, figures: Mapping[str, Mapping[str, float]]) -> str:
    """SVG of `outliers`: a line along the layers for each kind of linear, the worst expert for all
    of a layer."""
    found = {name: of["outliers"] for name, of in figures.items()}
    lines: dict[str, dict[int, float]] = {}
    for name, error in found.items():
        match = LAYER.search(name)
        if match and error > 0:
            of_kind = lines.setdefault(name.rpartition(".")[2], {})
            number = int(match[1])
            of_kind[number] = max(error, of_kind.get(number, 0.0))
    errors = [error for of_kind in lines.values() for error in of_kind.values()]
    most, least = max(errors, default=1.0) * 1.2, min(errors, default=0.1) / 1.2
    last = max((n for of_kind in lines.values() for n in of_kind), default=0) or 1
    left, top, width, height = 70, 50, 560, 260

    def place(number: int, error: float) -> tuple[float, float]:
        share = math.log(error / least) / math.log(most / least)
        return left + width * number / last, top + height * (1 - share)

    title = f"{model}: largest channel of a linear's inputs beside the median one, by layer"
    parts = [svg.text(10, 24, title, 'font-weight="bold"')]
    for number, (kind, of_kind) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        points = [place(*point) for point in sorted(of_kind.items())]
        parts += [svg.line(points, color)]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        parts.append(svg.text(left + width + 20, top + 20 * number, kind, color=color))
    for error in (least, most):
        parts.append(svg.text(10, place(0, error)[1] + 4, f"{error:,.1f}"))
    if found:
        worst = max(found, key=lambda name: found[name])
        words = f"worst: {worst}, {found[worst]:,.0f}x; layers 0 to {last}"
        parts.append(svg.text(left, top + height + 24, words))
    return svg.document(left + width + 180, top + height + 40, title, parts)
