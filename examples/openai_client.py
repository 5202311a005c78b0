"""Talk to a running server with the OpenAI client; speculation is the server's business.

make serve                                  # in another terminal
python examples/openai_client.py --base-url http://127.0.0.1:30000/v1
"""

from __future__ import annotations

from typing import Annotated

import typer
from openai import OpenAI


def main(
    base_url: Annotated[
        str, typer.Option(help="The server's OpenAI endpoint.")
    ] = "http://127.0.0.1:30000/v1",
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "What is the capital of France?",
    max_tokens: Annotated[int, typer.Option(help="Longest reply, in tokens.")] = 64,
) -> None:
    """Ask one question twice: whole, then streamed."""
    client = OpenAI(base_url=base_url, api_key="none")
    messages = [{"role": "user", "content": prompt}]
    reply = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=max_tokens
    )
    print(reply.choices[0].message.content)

    stream = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=max_tokens, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    typer.run(main)
