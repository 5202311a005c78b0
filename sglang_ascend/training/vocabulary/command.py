"""`sglang-ascend build-vocabulary`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_ascend.files import refuse_unwritable
from sglang_ascend.refusals import refusals
from sglang_ascend.tables import print_whole


def build_vocabulary(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder: tokenizer and config.json.")],
    text: Annotated[
        list[str],
        typer.Option(
            help="LANGUAGE=PATH or PATH, repeatable: .txt, .jsonl, the shards of `train generate`, "
            "or a folder of them. Without a name the script of each document is its language."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder that receives draft_vocabulary.json.")],
    size: Annotated[int, typer.Option(min=16, help="Tokens of a language at most.")] = 4096,
    svg: Annotated[Path | None, typer.Option(help="Also plot the coverage into this file.")] = None,
) -> None:
    """Rank a tokenizer's tokens by language, for a server to draft from.

    Counts the text by language and writes draft_vocabulary.json, for the folder of an MTP layer.
    Prints how much of each language's held-out text so many tokens cover.

    Example: `sglang-ascend build-vocabulary FOLDER --text en=en.txt --text zh.jsonl --out FOLDER`
    """
    from tqdm import tqdm

    from sglang_ascend.speculative.vocabulary.file import FILE_NAME
    from sglang_ascend.training.vocabulary.build import Builder
    from sglang_ascend.training.vocabulary.rankings import MIN_TOKENS
    from sglang_ascend.training.vocabulary.report import plot, table
    from sglang_ascend.training.vocabulary.sources import Source, parse_sources

    with refusals():
        sources = parse_sources(text)
        builder = Builder(folder)
        files = {"--out": out / FILE_NAME} | ({"--svg": svg} if svg else {})
        for option, file in files.items():  # refused before hours of counting
            file.parent.mkdir(parents=True, exist_ok=True)
            refuse_unwritable(file, option)
        with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:

            def tick(source: Source, num_tokens: int) -> None:
                bar.set_postfix_str(source.path.name, refresh=False)
                bar.update(num_tokens)

            counts, provenance = builder.count(sources, tick)
        listed = builder.write(out, counts, provenance, size)
        if svg:
            svg.write_text(plot(counts), encoding="utf-8")
    for language in sorted({one.language for one in sources if one.language} - listed.keys()):
        told = f"{language} has no list: its text has fewer than {MIN_TOKENS} tokens."
        typer.echo(told, err=True)
    print_whole(table(counts, listed))
