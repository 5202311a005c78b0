"""English and code of nano-deepseek's corpus in pieces, as JSON lines for `train text`."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Annotated

import typer

PARTS = ("austen", "wordnet", "python_docs", "python_code", "factbook", "maths", "chat")
WRITTEN_HERE = {"maths": 2500, "chat": 2500}  # documents of templates, which repeat themselves
PIECE, LEAST = 1200, 200  # characters; 320 tokens hold about 1,200 of English


def main(
    corpus: Annotated[Path, typer.Option(help="What recipes.nano_deepseek.text.corpus wrote.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
) -> None:
    """Shuffle each part's documents and cut them, so that any number of lines is a sample."""
    unfinished = out.with_name(out.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    rng = random.Random(3)
    for part in PARTS:
        documents = json.loads((corpus / f"{part}.train.json").read_text(encoding="utf-8"))
        rng.shuffle(documents)
        with (unfinished / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for document in documents[: WRITTEN_HERE.get(part)]:
                for start in range(0, len(document), PIECE):
                    piece = document[start : start + PIECE]
                    if len(piece) > LEAST:
                        file.write(json.dumps(piece) + "\n")
    unfinished.rename(out)


if __name__ == "__main__":
    typer.run(main)
