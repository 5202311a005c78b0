"""`sglang-ascend bench`: what MTP brings a server or a checkpoint, per task."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_ascend.bench.options import (
    ModelOption,
    NumPromptsOption,
    ServerArgsOption,
    TemperatureOption,
    model_folder,
    server_url,
)
from sglang_ascend.files import refuse_unwritable
from sglang_ascend.refusals import refusals
from sglang_ascend.tables import print_whole

# Options that say how replies are asked for.
OF_REPLIES = ("task", "prompts", "num_prompts", "max_new_tokens", "batch", "temperature")


def bench(
    url: Annotated[str | None, typer.Option(help="A running server: http://HOST:PORT.")] = None,
    plain_url: Annotated[
        str | None, typer.Option(help="Beside --url: the same model without speculation.")
    ] = None,
    model: ModelOption = None,
    server_args: ServerArgsOption = "",
    num_steps: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Drafts a step; repeat it for a server each. Default: MTP's own."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Two reports, or two addresses: B over A.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; repeat for more.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='Your own: a JSON list of {"domain", "prompt"}.')
    ] = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest reply.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once, of one task.")] = 1,
    temperature: TemperatureOption = 0.0,
    out: Annotated[Path, typer.Option(help="OUT.json and OUT.svg are written.")] = Path("bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on stdout too.")] = False,
) -> None:
    """Measure tokens/s with and without MTP, and how many drafts are accepted, on seven tasks.

    - **--model** starts one server without speculation and one with MTP (one for each --num-steps)
      on 127.0.0.1, and stops them. **--url** asks a server that runs, **--plain-url** the one that
      it is compared with. Servers take turns on the same prompts, in alternating order.
    - A speedup is the median of the rounds' ratios, with a 95 % bootstrap interval. Replies that
      loop (more than a quarter of their 4-grams are repetitions) are reported apart, as `looping`.
    - Acceptance length is given for K = 1 to 8 as far as servers draft: measured where a server
      has that K, else cut from the longer chains of another, which is an estimate.
    - **--compare A B** sets two reports side by side, prompt by prompt, or two running servers.

    Example: `sglang-ascend bench --model smollm2-mtp --out smollm2`

    Example: `sglang-ascend bench --url http://127.0.0.1:30000 --plain-url http://127.0.0.1:30001`

    Example: `sglang-ascend bench --compare before.json after.json`
    """
    from sglang_ascend.bench import run
    from sglang_ascend.bench.rounds import TASKS, read_tasks

    with refusals(RuntimeError):
        reports = compared_reports(compare, (url, plain_url, model, num_steps, server_args))
        refuse_bad_out(out, reports)
        tasks = run.select(read_tasks(prompts or TASKS), task or [], num_prompts)
        if reports:
            refuse_idle(task or None, prompts, num_prompts, max_new_tokens, batch, temperature)
            report = run.compare_reports(dict(zip("ab", reports, strict=True)))
        else:
            with addresses(url, plain_url, model, num_steps, server_args, compare) as urls:
                report = run.measure_tasks(urls, tasks, max_new_tokens, batch, temperature, model)
        write(report, out)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        print_report(report)


def compared_reports(compare: tuple[str, str] | None, servers: Sequence[object]) -> list[Path]:
    """The two files, or none where servers are compared, or nothing is; ``servers`` are those that
    other options name."""
    if compare and any(servers):
        raise ValueError("--compare names all that is measured: leave out other servers.")
    paths = [Path(name) for name in compare or ()]
    gone = [path for path in paths if not path.is_file()]
    if len(gone) == 1:
        raise ValueError(f"{gone[0]} is no file: --compare takes two reports, or two addresses.")
    return [] if gone else paths


def refuse_idle(*of_replies: object) -> None:
    """What ``OF_REPLIES`` names, of which two reports follow nothing."""
    options = signature(bench).parameters
    if of_replies != tuple(options[name].default for name in OF_REPLIES):
        raise ValueError(
            "two reports have their replies: leave out --task, --prompts, --num-prompts, "
            "--max-new-tokens, --batch and --temperature, or compare two addresses."
        )


def refuse_bad_out(out: Path, read: Sequence[Path]) -> None:
    """Before anything is measured; ``read`` are reports, which are to be there afterwards too."""
    if not out.name:
        raise ValueError(f"--out {out} is a folder: name the files in it, as {out / 'bench'}.")
    written = out.with_name(f"{out.name}.json")
    refuse_unwritable(written, "--out")
    for path in read:
        if written.exists() and written.samefile(path):
            raise ValueError(f"{path} would be overwritten by the comparison: name another --out.")


def write(report: Mapping[str, Any], out: Path) -> None:
    from sglang_ascend.bench.figures.plot import draw

    for suffix, content in ((".json", json.dumps(report, indent=1)), (".svg", draw(report))):
        out.with_name(out.name + suffix).write_text(content, encoding="utf-8")
    if reason := report.get("ended_early"):
        rounds = len(report["rounds"])
        raise ValueError(f"{reason.rstrip('.')}; {out}.json has the {rounds} rounds before it.")
    typer.echo(f"{out}.json has the figures, {out}.svg the plot.", err=True)


@contextmanager
def addresses(
    url: str | None,
    plain_url: str | None,
    model: str | None,
    num_steps: list[int] | None,
    server_args: str,
    compare: tuple[str, str] | None,
) -> Iterator[dict[str, str]]:
    """Of the servers that run, or of those that are started for this block."""
    from sglang_ascend.bench import run

    if compare:
        yield {"a": compare[0], "b": compare[1]}
    elif model and not url and not plain_url:
        with run.started_servers(model_folder(model), num_steps or [], server_args) as started:
            yield started
    elif num_steps or (plain_url and not url):
        flag, needed = ("--num-steps", "--model") if num_steps else ("--plain-url", "--url")
        raise ValueError(f"{flag} needs {needed}.")
    else:
        with server_url(url, model, server_args) as address:
            yield {"plain": plain_url, "mtp": address} if plain_url else {"mtp": address}


def print_report(report: Mapping[str, Any]) -> None:
    """A row for each task and one for their mean, then acceptance by position and by K."""
    from rich.table import Table

    baseline, main = report["baseline"], report["main"]
    table = Table(title=f"{report['model']} on {report['machine']}")
    table.add_column("task")
    rates = [f"{name}_tok_s" for name in report["servers"]]
    headings = [f"{name} tok/s" for name in report["servers"]]
    headings += ["speedup", "95 % interval", "tokens/forward", "2-gram lookup", "looping"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for task, row in [*report["tasks"].items(), ("mean", report["mean"])]:
        keys = (*rates, "speedup", "accept_length", "lookup_accept_length")
        cells = {key: "-" if row.get(key) is None else f"{row[key]:.2f}" for key in keys}
        interval = "-"
        if row.get("speedup_low") is not None:
            interval = f"{row['speedup_low']:.2f} - {row['speedup_high']:.2f}"
        loops = row.get("looping", {}).get("rounds", "")
        first, rest = [cells[key] for key in keys[: len(rates) + 1]], keys[len(rates) + 1 :]
        table.add_row(task, *first, interval, *(cells[key] for key in rest), str(loops))
    print_whole(table)
    if baseline:
        typer.echo(f"speedup: {main} over {baseline}, median of the rounds' ratios")
    for name, row in report["acceptance"].items():
        shares = ", ".join(
            "-" if share is None else f"{share:.2f}" for share in row["per_position"]
        )
        typer.echo(f"{name}: accepted at draft 1 to {len(row['per_position'])}: {shares}")
    lengths = [
        f"{key}: {row['accept_length']:.2f}{'' if row['measured'] else ' (estimate)'}"
        for key, row in report["num_steps"].items()
    ]
    if lengths:
        typer.echo(f"tokens per forward with K drafts: {', '.join(lengths)}")
