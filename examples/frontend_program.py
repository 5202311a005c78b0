"""An SGLang frontend program against a running server: gen, select, fork and regex.

make serve                                  # in another terminal
python examples/frontend_program.py --base-url http://127.0.0.1:30000
"""

from __future__ import annotations

from typing import Annotated

import sglang as sgl
import typer
from sglang.lang.chat_template import get_chat_template


@sgl.function
def trip_notes(s: sgl.ProgramState, city: str) -> None:
    s += sgl.user(f"I am going to {city}. Give me one short tip.")
    s += sgl.assistant(sgl.gen("tip", max_tokens=32, temperature=0))

    s += sgl.user("Should I go in summer or in winter?")
    s += sgl.assistant("I would go in " + sgl.select("season", choices=["summer", "winter"]))

    s += sgl.user("How many days should I stay?")
    s += sgl.assistant(sgl.gen("days", regex=r"[1-9] days", temperature=0))

    branches = s.fork(2)
    for branch, topic in zip(branches, ("food", "transport"), strict=True):
        branch += sgl.user(f"And about {topic}?")
        branch += sgl.assistant(sgl.gen("advice", max_tokens=24, temperature=0))
    s += sgl.user("Sum it up.")
    s += sgl.assistant(f"Food: {branches[0]['advice']} Transport: {branches[1]['advice']}")


def main(
    base_url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:30000",
    city: Annotated[str, typer.Option(help="Where to go.")] = "Paris",
    chat_template: Annotated[
        str, typer.Option(help="The model's template, by the frontend's name for it.")
    ] = "chatml",
) -> None:
    """Run the program once and print what each call returned."""
    backend = sgl.RuntimeEndpoint(base_url)
    backend.chat_template = get_chat_template(chat_template)
    sgl.set_default_backend(backend)
    state = trip_notes.run(city=city)
    for name in ("tip", "season", "days"):
        print(f"{name}: {state[name]}")
    print(state.messages()[-1]["content"])


if __name__ == "__main__":
    typer.run(main)
