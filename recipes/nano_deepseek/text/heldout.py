"""Owns the committed evaluation questions: held out by hash, so training cannot have seen them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from recipes.nano_deepseek.text.questions import draw_questions

SIZES = {"maths": 160, "chat": 80}


def held_out_prompts(domain: str) -> list[dict[str, str]]:
    """The first held-out questions of `domain`, as `outputs.read_prompts` takes them."""
    questions = draw_questions(domain).held_out[: SIZES[domain]]
    return [{"domain": domain, "prompt": question} for question, _ in questions]


def main(
    maths: Annotated[Path, typer.Option(help="File for the maths questions.")],
    chat: Annotated[Path, typer.Option(help="File for the chat questions.")],
) -> None:
    """Write the held-out questions that the tests and the acceptance table use."""
    for domain, path in (("maths", maths), ("chat", chat)):
        text = json.dumps(held_out_prompts(domain), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
