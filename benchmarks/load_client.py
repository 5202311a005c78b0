"""Sends one request of the mix and says how it ended; what must not happen is a ``problem``."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests

from benchmarks.request_mix import Job, matches


@dataclass(frozen=True)
class Reply:
    """One sequence as its twin must say it, too."""

    tokens: list[int]
    text: str
    finish_reason: dict[str, Any]

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Reply:
        return cls(body["output_ids"], body["text"], body["meta_info"]["finish_reason"])


@dataclass(frozen=True)
class Outcome:
    """How a request ended: finished, aborted, disconnected or refused, or with a problem."""

    job: Job
    end: str = "finished"
    replies: list[Reply] = field(default_factory=list)
    cached_tokens: int = 0
    num_verified: int = 0  # target forwards after the first token
    problem: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(reply.tokens) for reply in self.replies)


class LoadClient:
    """Requests to one server; each gets ``timeout_s`` seconds from first to last byte."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.timeout_s = timeout_s

    def send(self, job: Job) -> Outcome:
        try:
            if job.body.get("stream"):
                return self._stream(job)
            if job.end == "aborted":
                return self._abort(job)
            return _judged(job, self._post(job.path, job.body))
        except requests.Timeout:
            return Outcome(job, "failed", problem=f"no answer in {self.timeout_s:.0f} s")
        except (requests.RequestException, ValueError, KeyError) as error:
            return Outcome(job, "failed", problem=f"{type(error).__name__}: {error}"[:500])

    def twin(self, job: Job) -> Outcome:
        """The same request in one piece, as a server without speculation answers it."""
        body = {name: value for name, value in job.body.items() if name != "stream"}
        return self.send(Job(**{**vars(job), "body": body}))

    def _post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=self.timeout_s, **options)

    def _abort(self, job: Job) -> Outcome:
        timer = threading.Timer(
            job.abort_after_s, self._post, ("/abort_request", {"rid": job.body["rid"]})
        )
        timer.daemon = True
        timer.start()
        try:
            return _judged(job, self._post(job.path, job.body))
        finally:
            timer.cancel()

    def _stream(self, job: Job) -> Outcome:
        """Reads to the end, or some chunks of a reply whose client then goes away."""
        deadline, last, count = time.monotonic() + self.timeout_s, b"", 0
        with self._post(job.path, job.body, stream=True) as response:
            for line in response.iter_lines():
                if job.end == "disconnected" and count >= job.chunks_read:
                    return Outcome(job, "disconnected")
                if line.startswith(b"data: {"):
                    last, count = line, count + 1
                if time.monotonic() > deadline:
                    raise requests.Timeout
        if job.end == "disconnected":
            return Outcome(job, "disconnected")
        return _judged_bodies(job, [json.loads(last.removeprefix(b"data: "))])


def _judged(job: Job, response: requests.Response) -> Outcome:
    status = response.status_code
    if job.end == "refused":
        wrong = None if 400 <= status < 500 else f"HTTP {status} to a malformed request"
        return Outcome(job, "refused", problem=wrong)
    if job.end == "aborted" and status != 200:
        return Outcome(job, "aborted")
    if status != 200:
        return Outcome(job, "failed", problem=f"HTTP {status}: {response.text[:500]}")
    body = response.json()
    return _judged_bodies(job, body if isinstance(body, list) else [body])


def _judged_bodies(job: Job, bodies: list[dict[str, Any]]) -> Outcome:
    replies = [Reply.from_json(body) for body in bodies]
    was_aborted = any((reply.finish_reason or {}).get("type") == "abort" for reply in replies)
    if was_aborted and job.end == "aborted":
        return Outcome(job, "aborted")
    return Outcome(
        job,
        "finished",
        replies,
        cached_tokens=max(body["meta_info"]["cached_tokens"] for body in bodies),
        num_verified=sum(body["meta_info"].get("spec_verify_ct", 0) for body in bodies),
        problem=_first_problem(job, replies),
    )


def _first_problem(job: Job, replies: list[Reply]) -> str | None:
    """What a reply shows by itself; whether its tokens are right is for its twin to say."""
    limit = job.body["sampling_params"]["max_new_tokens"]
    for reply in replies:
        reason = (reply.finish_reason or {}).get("type")
        if reason not in ("stop", "length"):
            return f"ended with {reply.finish_reason}"
        if not 1 <= len(reply.tokens) <= limit:
            return f"{len(reply.tokens)} tokens, where 1 to {limit} were asked for"
        if job.pattern and reason == "stop" and not matches(job.pattern, reply.text):
            return f"{reply.text!r} does not match {job.pattern}"
    return None
