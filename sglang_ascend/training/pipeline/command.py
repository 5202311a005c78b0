"""`sglang-ascend train-mtp`."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from sglang_ascend.files import alone_in
from sglang_ascend.refusals import refusals
from sglang_ascend.training.pipeline import options as asked

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_ascend.training.pipeline.replies import RepliesPipeline

NOT_OPTIONS = ("target", "out", "threads")


def train_mtp(
    target: asked.TargetArgument,
    out: asked.OutOption,
    tokens: asked.TokensOption = 500_000,
    prompts: asked.PromptsOption = None,
    held_out: asked.HeldOutOption = None,
    text: asked.TextOption = None,
    text_tokens: asked.TextTokensOption = None,
    own_share: asked.OwnShareOption = None,
    temperature_mix: asked.TemperatureMixOption = "0,0,0,0,1",
    max_length: asked.MaxLengthOption = 320,
    max_new_tokens: asked.MaxNewTokensOption = 192,
    init: asked.InitOption = False,
    max_steps: asked.MaxStepsOption = None,
    loss: asked.LossOption = "kl",
    num_steps: asked.NumStepsOption = 3,
    on_policy_rounds: asked.OnPolicyRoundsOption = 0,
    replay: asked.ReplayOption = 2.0,
    learning_rate: asked.LearningRateOption = 2e-3,
    muon_rate: asked.MuonRateOption = 0.02,
    tokens_per_batch: asked.TokensPerBatchOption = 2048,
    vocabulary: asked.VocabularyOption = 16384,
    dtype: asked.DtypeOption = None,
    seed: asked.SeedOption = 0,
    device: asked.DeviceOption = "auto",
    threads: asked.ThreadsOption = None,
) -> None:
    """Train the MTP layer of a checkpoint, from the target to a folder that is served.

    The target writes replies; a layer learns to draft them K tokens ahead, and is measured on
    prompts that it never saw; layer and target are joined, checked as a server checks them, and
    written to OUT/model with the plots, provenance and hashes beside it.

    Run the same command again after a kill, a full disk or a power cut: finished stages are kept,
    the others go on. With larger --tokens or --max-steps a finished training goes on too. An option
    that would spoil what is there is refused by name.

    Example: `sglang-ascend train-mtp my-llama --out my-llama-mtp --tokens 500000`
    """
    options = {name: value for name, value in locals().items() if name not in NOT_OPTIONS}
    with refusals(RuntimeError), full_disk(out):
        settle(options)
        report = run(out, options, threads, lambda say: _pipeline(target, out, options, say))
    served = "python -m sglang.launch_server --speculative-algorithm MTP --model-path"
    tell(report, f"{served} {quote(str(out / 'model'))}")
    typer.echo(out / "model")


def _pipeline(
    target: Path, out: Path, options: dict[str, Any], say: Callable[[str], object]
) -> RepliesPipeline:
    from sglang_ascend.training.pipeline.build import Pipeline

    return Pipeline(target, out, asked.Options(**options), say)


def settle(options: dict[str, Any]) -> None:
    """What follows from other options, in place. Raises ValueError."""
    options["temperature_mix"] = _temperatures(options["temperature_mix"])
    options["text"] = tuple(options["text"] or ())
    if not options["text"]:
        options["text_tokens"] = 0
    elif options["text_tokens"] is None:
        options["text_tokens"] = options["tokens"]
    options["own_share"] = asked.own_share_of(options["own_share"], options["prompts"])


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if min(found) < 0:
        raise ValueError(f"--temperature-mix {text!r} is no list of temperatures: write 0,0,1.")
    return found


def run(
    out: Path,
    options: dict[str, Any],
    threads: int | None,
    open_in: Callable[[Callable[[str], object]], RepliesPipeline],
) -> dict[str, Any]:
    """Every stage of the pipeline that ``open_in`` opens, alone in ``out`` -> what was measured."""
    # Behind the help, which loads no torch.
    import torch
    from transformers.utils import logging

    from sglang_ascend.training.targets.device import compute_device, dtype_of_products

    device = compute_device(options["device"])
    options |= {"device": str(device), "dtype": dtype_of_products(options["dtype"], device)}
    logging.disable_progress_bar()  # each stage has one of its own
    if threads:
        torch.set_num_threads(threads)
    with alone_in(out):
        return open_in(_console().print).run()


def tell(report: dict[str, Any], serve: str) -> None:
    """What was measured, and the command that serves what was made."""
    for name, figures in report.items():
        found = figures["all"]
        shares = " ".join(f"{share:.2f}" for share in found.get("conditional", ()))
        length = found.get("acceptance_length", "unknown: every held-out reply loops")
        _console().print(f"{name}: accepted {shares}, tokens per forward {length}")
    typer.echo(f"serve it: {serve}", err=True)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def full_disk(out: Path) -> Iterator[None]:
    """Says of a write that found no room what is to be done; what was there before is whole."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"no space is left for {out}: free some and run the same command again, which goes "
                "on from what is there."
            ) from None
        raise
