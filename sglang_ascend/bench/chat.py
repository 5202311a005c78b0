"""`sglang-ascend chat`: one reply, streamed, and the line that says how it was made."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_ascend.bench.options import ModelOption, ServerArgsOption, server_url
from sglang_ascend.refusals import refusals

if TYPE_CHECKING:
    from sglang_ascend.bench.client import Reply


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What the user says; left out, it is read from stdin.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running server: http://HOST:PORT.")] = None,
    model: ModelOption = None,
    server_args: ServerArgsOption = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest reply.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 is greedy; left out, the model samples as its card says."),
    ] = None,
) -> None:
    """Answer one prompt, and say how fast and with how many accepted drafts.

    The reply streams to stdout. The statistics are one line on stderr: tokens, seconds and tokens/s
    of the whole reply, the time to its first piece, tokens per forward of the target, and the share
    of drafts 1, 2, ... that were accepted where the draft before them was. A server without
    speculation has no drafts to speak of.

    --url asks a server that runs. --model starts one with MTP on 127.0.0.1, and stops it behind the
    reply.

    Example: `sglang-ascend chat "What is the capital of France?" --model smollm2-mtp`

    Example: `sglang-ascend chat --url http://127.0.0.1:30000 < question.txt`
    """
    from sglang_ascend.bench.client import Client

    with refusals(RuntimeError):
        prompt = _read(prompt)
        if not prompt:
            raise ValueError("there is no prompt: give it as an argument, or on stdin.")
        with server_url(url, model, server_args) as address:
            reply = Client(address).stream(prompt, max_new_tokens, temperature, _show)
    typer.echo()
    typer.echo(statistics_line(reply), err=True)


def _read(prompt: str | None) -> str:
    """The argument, or what stands on stdin."""
    try:
        text = sys.stdin.read().strip() if prompt is None else prompt
        text.encode()  # by the locale what cannot be decoded is an error, or half a character
    except UnicodeError:
        raise ValueError("the prompt is not UTF-8: convert it, as with iconv.") from None
    return text


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def statistics_line(reply: Reply) -> str:
    """As in "64 tokens in 1.42 s, 45.1 tokens/s, first after 0.08 s | 2.06 tokens per forward"."""
    parts = [
        f"{reply.num_tokens} tokens in {reply.seconds:.2f} s, "
        f"{reply.num_tokens / reply.seconds:.1f} tokens/s"
    ]
    if reply.first_token_s is not None:
        parts[0] += f", first after {reply.first_token_s:.2f} s"
    if reply.acceptance is None:
        # A reply of one token is the prefill's, and no server says anything of drafts.
        nothing = "no speculation" if reply.num_tokens > 1 else "no forward but the prefill"
        return f"{parts[0]} | {nothing}"
    shares = ", ".join("-" if s is None else f"{s:.2f}" for s in reply.acceptance.per_position)
    parts.append(f"{reply.acceptance.length:.2f} tokens per forward")
    parts.append(f"accepted at draft 1 to {reply.acceptance.num_drafts}: {shares}")
    return " | ".join(parts)
