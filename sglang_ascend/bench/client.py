"""A client of one SGLang server: chat replies, their tokens, and what the server says of drafts."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from sglang_ascend.bench.figures.acceptance import Acceptance
from sglang_ascend.bench.server import REPLY_TIMEOUT_S

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServerError(RuntimeError):
    """The server cannot be reached or refuses; the message is one sentence."""


@dataclass(frozen=True)
class Reply:
    """One finished chat reply; token ids only where they were asked for."""

    text: str
    num_tokens: int
    seconds: float
    first_token_s: float | None  # known of a stream
    acceptance: Acceptance | None  # None of a server without speculation
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()


class Client:
    """Talks to ``url``, past any proxy where that is this machine."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is no address of a server: write http://HOST:PORT.")
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname in LOOPBACK else []
        self._opener = urllib.request.build_opener(*proxies)

    def info(self) -> dict[str, Any]:
        """The server's flags, as they were resolved, and its version."""
        found = self._json("/server_info")
        if "model_path" not in found:
            raise self._not_sglangs("/server_info", "model_path")
        return found

    def chat(self, prompt: str, max_new_tokens: int, temperature: float | None = None) -> Reply:
        """The whole reply to one user turn, with token ids."""
        body = _chat_body(prompt, max_new_tokens, temperature)
        wanted = ("return_meta_info", "return_token_ids", "return_prompt_token_ids")
        start = time.perf_counter()
        answer = self._json("/v1/chat/completions", body | dict.fromkeys(wanted, True))
        seconds = time.perf_counter() - start
        try:
            (choice,) = answer["choices"]
            return Reply(
                choice["message"]["content"] or "",
                answer["usage"]["completion_tokens"],
                seconds,
                None,
                Acceptance.of_reply(choice["meta_info"]),
                tuple(choice["prompt_token_ids"]),
                tuple(choice["response_token_ids"]),
            )
        except KeyError as error:
            raise self._not_sglangs("/v1/chat/completions", error.args[0]) from None

    def stream(
        self,
        prompt: str,
        max_new_tokens: int,
        temperature: float | None,
        show: Callable[[str], object],
    ) -> Reply:
        """The reply to one user turn, each piece of its text, thinking included, given to ``show``
        as it comes."""
        body = _chat_body(prompt, max_new_tokens, temperature)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        start, first = time.perf_counter(), None
        text, num_tokens, details = "", 0, {}
        with self._open("/v1/chat/completions", body | {"return_spec_tokens_details": True}) as sse:
            for event in _events(sse):
                for choice in event.get("choices") or ():
                    delta = choice["delta"]
                    # With --reasoning-parser what the model thinks has a field of its own.
                    piece = delta.get("reasoning_content") or ""
                    piece += delta.get("content") or ""
                    if piece:
                        first = first or time.perf_counter() - start
                        text += piece
                        show(piece)
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                details = (event.get("sglext") or {}).get("spec_tokens_details") or details
        seconds = time.perf_counter() - start
        return Reply(text, num_tokens, seconds, first, Acceptance.of_reply(details))

    def _not_sglangs(self, path: str, missing: str) -> ServerError:
        """An older SGLang, or what passes requests on and leaves fields out."""
        return ServerError(
            f"{self.url}{path} answered without {missing!r}: write the address of a server of "
            "SGLang 0.5.23 itself."
        )

    def _json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole answer."""
        with self._open(path, body) as reply:
            try:
                return json.load(reply)
            except (OSError, HTTPException):
                raise ServerError(f"{self.url}{path} broke off its answer: see its log.") from None
            except ValueError:
                raise ServerError(
                    f"{self.url}{path} answered no JSON: write the address of an SGLang server."
                ) from None

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            return self._opener.open(request, timeout=REPLY_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise ServerError(
                f"{self.url}{path} answered HTTP {error.code}: {_message(error.read())}"
            ) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerError(
                f"no server answers at {self.url} ({reason}): start one, or name --model."
            ) from None


def _chat_body(prompt: str, max_new_tokens: int, temperature: float | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_new_tokens,
    }
    return body if temperature is None else body | {"temperature": temperature}


def _events(lines: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, until [DONE]."""
    for line in _whole_lines(lines):
        data = line.decode("utf-8").removeprefix("data:").strip()
        if not line.startswith(b"data:") or not data:
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(f"the server ended its reply: {_message(data.encode())}")
        yield event
    raise ServerError("the server ended its reply before it was complete: see its log.")


def _whole_lines(lines: HTTPResponse) -> Iterator[bytes]:
    """Those that came whole: a server that is killed cuts a line or a chunk, or the connection."""
    with contextlib.suppress(OSError, HTTPException):
        for line in lines:
            if line.endswith(b"\n"):
                yield line


def _message(body: bytes) -> str:
    """What an error says, of the shapes that SGLang gives it."""
    text = body.decode("utf-8", errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error", found)
        return str(found.get("message", found))[:500]
    except (ValueError, AttributeError):
        return text[:500]
