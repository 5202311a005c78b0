"""The command `sglang-ascend plan-memory`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_ascend.refusals import refusals

if TYPE_CHECKING:
    from sglang_ascend.memory.plan import Plan

DEFAULT_WEIGHTS = ("bf16", "w8a8", "w4a8")
DEFAULT_RANKS = (1, 2, 4, 8, 16)


def plan_memory(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json; no weights needed.")],
    weights: Annotated[
        list[str] | None,
        typer.Option(help="bf16 or a recipe of `quantize`; repeatable. Default: bf16, w8a8, w4a8."),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Devices (--tp-size); repeatable. Default: 1, 2, 4, 8, 16."),
    ] = None,
    dp_size: Annotated[
        int, typer.Option(min=1, help="With --enable-dp-attention: one group a rank.")
    ] = 1,
    device_gib: Annotated[float, typer.Option(min=1, help="Memory of one device, GiB.")] = 64,
    mem_fraction_static: Annotated[
        float, typer.Option(min=0.01, max=1, help="Its share for weights and KV cache.")
    ] = 0.8,
    context_length: Annotated[int, typer.Option(min=1, help="Tokens of a request.")] = 8192,
    speculative_adaptive: Annotated[
        bool, typer.Option("--speculative-adaptive", help="Count the hidden states it keeps.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which devices a model fits on, and how many tokens of KV cache are left.

    Counts the tensors that config.json implies, MTP layer included: in all as files hold them, on
    a rank as this package's methods load them on an NPU, and says what is held decoded. Heads,
    experts and vocabulary are divided, norms, routers and the projections into the latent space are
    on every rank; one rank alone has a draft vocabulary's head too. The KV cache is bf16. Not
    counted: rotary tables, activations, graphs and libraries. Nothing is measured. SGLang's own
    count leaves out what --speculative-adaptive keeps: give it the tokens as --max-total-tokens.

    Example: `sglang-ascend plan-memory my-deepseek --ranks 8 --ranks 16`
    """
    from sglang_ascend.checkpoint.config import read_config
    from sglang_ascend.memory.plan import Deployment, plan
    from sglang_ascend.memory.weights import Weights

    with refusals():
        config = read_config(folder)
        plans = [
            plan(
                config,
                one,
                Deployment(
                    number,
                    dp_size,
                    round(device_gib * 2**30),
                    mem_fraction_static,
                    context_length,
                    speculative_adaptive,
                ),
            )
            for one in (Weights.of(config, name) for name in weights or DEFAULT_WEIGHTS)
            for number in _fitting(config.size("num_attention_heads"), ranks, dp_size)
        ]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in plans], indent=2))
    else:
        _print(plans, context_length)


def _fitting(heads: int, ranks: list[int] | None, dp_size: int) -> list[int]:
    """`ranks`, or those of the default that can serve the model at all."""
    if ranks:
        return ranks
    if dp_size > 1:
        return [dp_size]
    return [number for number in DEFAULT_RANKS if heads % number == 0]


def _print(plans: list[Plan], context_length: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("weights")
    for title in ("GB in all", "ranks", "GiB a rank", "KV bytes a token", "tokens"):
        table.add_column(title, justify="right")
    table.add_column(f"requests of {context_length:,}", justify="right")
    for one in plans:
        left = (f"{one.tokens:,}", f"{one.requests:,}")
        if not one.tokens:
            left = ("not served" if one.refused else "does not fit", "")
        table.add_row(
            one.weights,
            f"{one.total_bytes / 1e9:,.1f}",
            str(one.ranks),
            "" if one.refused else f"{one.rank_bytes / 2**30:,.1f}",
            f"{one.token_bytes:,}",
            *left,
        )
    console = Console()
    console.print(table)
    ranks: dict[tuple[str, str], list[str]] = {}
    for one in plans:
        for note in _notes(one):
            ranks.setdefault((one.weights, note), []).append(str(one.ranks))
    for (weights, note), numbers in ranks.items():
        console.print(f"{weights}, ranks {', '.join(numbers)}: {note}", markup=False)


def _notes(one: Plan) -> Iterator[str]:
    for scheme, linears in one.decoded.items():
        yield f"{scheme} is held decoded, 16 bits a weight, in {', '.join(linears)}."
    if one.refused:
        yield f"{one.refused.removesuffix('.')}."
