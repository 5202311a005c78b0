"""The mixed load finds what must not happen: a wrong token, a hang, a held slot, a bad request that
is served. Servers are fakes that make one mistake, or none.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks import load_with_twin
from benchmarks.load_client import LoadClient
from benchmarks.load_with_twin import MixedLoad
from benchmarks.request_mix import JSON_PATTERN, MALFORMED, RequestMix, matches

NUM_REQUESTS = 60

CONSTRAINED = {
    r"(yes|no), [a-z]{4,9} [0-9]{3}": "yes, abcd 123",
    r"#### [0-9]{1,4}": "#### 12",
    r"[A-Z][a-z]{2,8}( [a-z]{2,8}){1,12}\.": "Abc def.",
}
JSON_TEXT = '{"name": "abc", "count": 3}'


class FakeTokenizer:
    vocab_size = 4096

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % self.vocab_size for letter in text]

    def apply_chat_template(self, turns: list[dict[str, str]], **options: bool) -> str:
        return "\n".join(turn["content"] for turn in turns)


class FakeServer(ThreadingHTTPServer):
    """Answers every prompt with its own tokens, times seven."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mistake = mistake
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        used = 1 if self.server.mistake == "holds a slot" else 0
        load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": used}
        self.answer(200, {"loads": [load | {"timestamp": time.time()}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self.path.startswith(("/generate", "/v1")):
            self.answer(200, {})
        elif (self.path, body) in MALFORMED:
            self.answer(200 if self.server.mistake == "serves bad requests" else 400, {})
        else:
            if self.server.mistake == "hangs":
                time.sleep(5)
            self.answer(200, self.reply(body), stream=body.get("stream", False))

    def reply(self, body: dict[str, Any]) -> Any:
        parameters = body["sampling_params"]
        tokens = [7 * token for token in body["input_ids"]][: parameters["max_new_tokens"]]
        if self.server.mistake == "differs":
            tokens[-1] += 1
        text = CONSTRAINED.get(parameters.get("regex", ""), "3 + 4")
        text = JSON_TEXT if "json_schema" in parameters else text
        meta = {"finish_reason": {"type": "stop"}, "cached_tokens": 1}
        reply = {"output_ids": tokens, "text": text, "meta_info": meta}
        return [reply] * parameters["n"] if "n" in parameters else reply

    def answer(self, status: int, body: Any, stream: bool = False) -> None:
        data = json.dumps(body).encode()
        data = b"data: " + data + b"\n\n" if stream else data
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def loaded(mistake: str) -> MixedLoad:
    """With a server that makes this mistake, after NUM_REQUESTS. Only of one that hangs the client
    is impatient: the others may take a while on a busy machine."""
    timeout_s = 2.0 if mistake == "hangs" else 120.0
    with FakeServer(mistake) as server, FakeServer() as twin:
        clients = (LoadClient(fake.url, timeout_s) for fake in (server, twin))
        mix = RequestMix(FakeTokenizer(), seed=0)
        load = MixedLoad(mix, *clients, concurrency=8, most_requests=NUM_REQUESTS)
        load.run(seconds=300)
        load.check_idle()
        load.finish_comparing()
        for fake in (server, twin):
            fake.shutdown()
    return load


def test_a_server_without_a_mistake_passes() -> None:
    load = loaded("")
    assert load.mismatches == load.problems == []
    assert load.sums["compared"] > NUM_REQUESTS // 3
    assert load.idle == [{"running": 0, "waiting": 0, "used": 0, "used_after_flush": 0}]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("hangs", "no answer in 2 s"),
        ("holds a slot", "not at rest"),
        ("serves bad requests", "HTTP 200 to a malformed request"),
    ],
)
def test_a_mistake_is_a_problem(mistake: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_with_twin, "IDLE_TIMEOUT_S", 1)
    assert any(said in problem for problem in loaded(mistake).problems)


def test_a_wrong_token_is_a_mismatch() -> None:
    load = loaded("differs")
    assert load.mismatches
    assert load.problems == []


def test_the_patterns_of_the_mix_judge_a_reply() -> None:
    assert all(matches(pattern, text) for pattern, text in CONSTRAINED.items())
    assert matches(JSON_PATTERN, JSON_TEXT)
    assert not matches(JSON_PATTERN, '{"name": "abc"}')


def test_a_request_depends_on_the_seed_and_its_number_alone() -> None:
    first, again, other = (RequestMix(FakeTokenizer(), seed) for seed in (1, 1, 2))
    assert [first.job(i) for i in range(50)] == [again.job(i) for i in reversed(range(50))][::-1]
    assert first.job(7) != other.job(7)
