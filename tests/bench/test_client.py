"""What goes wrong between a command and a server is one sentence; the servers here are fakes."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_ascend.bench import server
from sglang_ascend.bench.chat import statistics_line
from sglang_ascend.bench.client import Client, Reply, ServerError
from sglang_ascend.bench.server import SERVER_PORTS, free_port
from sglang_ascend.cli import app

RUNNER = CliRunner()


class Refusing(BaseHTTPRequestHandler):
    """400 to a short reply; a stream that breaks off to any other, in silence to one of two, within
    a chunk to one of three and within a line to one of four. A page to who asks for its flags."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        piece = json.dumps({"choices": [{"delta": {"content": "Once"}}]})
        if body["max_tokens"] == 1:
            self.answer(400, b'{"object": "error", "message": "too short."}')
        elif body["max_tokens"] == 2:
            self.answer(200, f"data: {piece}\n\n".encode())
        elif body["max_tokens"] == 3:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(f"ff\r\ndata: {piece}\n\n".encode())
        elif body["max_tokens"] == 4:
            self.answer(200, f"data: {piece}\n\ndata: {piece[:9]}".encode(), missing=99)
        else:
            error = json.dumps({"error": {"message": "out of memory."}})
            self.answer(200, f"data: {piece}\n\ndata: {error}\n\n".encode())

    def do_GET(self) -> None:
        self.answer(200, b"<html>Welcome</html>")

    def answer(self, status: int, data: bytes, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + missing))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def said(*words: str, stdin: str | bytes = "") -> str:
    result = RUNNER.invoke(app, ["chat", *words], input=stdin)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("sglang-ascend: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_a_prompt_of_another_encoding_is_refused():
    """Python decodes arguments, and stdin too where there is no locale, with surrogates."""
    assert "the prompt is not UTF-8" in said("--url", "http://x", stdin=b"fa\xe7ade")
    assert "the prompt is not UTF-8" in said("fa\udce7ade", "--url", "http://x")


def test_a_refusal_is_what_the_server_says(refusing):
    assert "HTTP 400: too short." in said("Hello", "--url", refusing, "--max-new-tokens", "1")


def test_a_reply_that_breaks_off_is_an_error(refusing):
    assert "ended its reply: out of memory." in said("Hello", "--url", refusing)


@pytest.mark.parametrize("where", ["2", "3", "4"])
def test_a_reply_that_ends_before_it_says_so_is_an_error(refusing, where):
    assert "before it was complete" in said("Hello", "--url", refusing, "--max-new-tokens", where)


def test_an_answer_that_is_cut_or_is_a_page_is_an_error(refusing):
    client = Client(refusing)
    with pytest.raises(ServerError, match=f"{refusing}/server_info answered no JSON: write the"):
        client.info()
    with pytest.raises(ServerError, match=f"{refusing}/v1/chat/completions broke off its answer"):
        client.chat("Hello", 4)


def test_an_answer_that_lacks_what_sglang_says_is_an_error(monkeypatch):
    """As of an older version, or of a router that leaves out fields it does not know."""
    client = Client("http://x")
    monkeypatch.setattr(client, "_json", lambda path, body=None: {"version": "0.4"})
    with pytest.raises(ServerError, match=r"x/server_info answered without 'model_path': write"):
        client.info()
    choice = {"message": {"content": "Once"}}
    answer = {"choices": [choice], "usage": {"completion_tokens": 1}}
    monkeypatch.setattr(client, "_json", lambda path, body=None: answer)
    with pytest.raises(ServerError, match=r"x/v1/chat/completions answered without 'meta_info'"):
        client.chat("Hello", 4)


def test_what_a_model_thinks_is_shown_as_it_comes(monkeypatch):
    """A server with --reasoning-parser gives it a field of its own, and the answer none before."""
    deltas = [{"content": ""}, {"content": None, "reasoning_content": "Hm. "}, {"content": "Yes."}]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    stream = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    client, shown = Client("http://x"), []
    monkeypatch.setattr(client, "_open", lambda path, body: io.BytesIO(stream.encode()))
    assert client.stream("Really?", 9, None, shown.append).text == "Hm. Yes."
    assert shown == ["Hm. ", "Yes."]


@pytest.mark.parametrize(
    ("num_tokens", "said"), [(1, "no forward but the prefill"), (2, "no speculation")]
)
def test_of_one_token_no_server_says_whether_it_drafts(num_tokens, said):
    reply = Reply("Yes", num_tokens, 0.5, 0.25, acceptance=None)
    assert statistics_line(reply).endswith(f" | {said}")


def test_a_server_that_is_not_there_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    assert f"no server answers at {url}" in said("Hello", "--url", url)


def test_a_server_is_given_no_port_that_others_are_given_unasked(monkeypatch):
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        assert port in SERVER_PORTS
        monkeypatch.setattr(server, "SERVER_PORTS", range(port, port + 1))
        monkeypatch.setattr(server, "TRIES", 1)
        with pytest.raises(OSError, match=f"1 ports of {port} to {port} are taken"):
            free_port()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["Hello"], "name either a running server with --url, or a checkpoint with --model."),
        (["Hello", "--url", "http://x", "--model", "y"], "name either a running server"),
        (["Hello", "--url", "localhost"], "is no address of a server"),
        (["Hello", "--url", "http://x", "--server-args", "--tp-size 2"], "name --model"),
        (["Hello", "--model", "/", "--server-args", "'"], "--server-args ' cannot be read"),
        (["Hello", "--model", "gpt-5"], "'gpt-5' is not a model of this package"),
        (["--url", "http://x"], "there is no prompt"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(words, sentence):
    assert sentence in said(*words)
