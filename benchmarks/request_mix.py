"""A seeded mix of requests such as many users send at once.

Request i depends on the seed and on i alone, so that a failure can be repeated by itself.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from recipes.nano_deepseek.text import chat, maths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 200
MAX_PROMPT_TOKENS = 400
NUM_SHARED = 12
# An abort comes while its request waits, is prefilled, decodes, or is just done.
MAX_ABORT_DELAY_S = 3.0
MAX_CHUNKS_READ = 12

End = Literal["finished", "aborted", "disconnected", "refused"]
Body = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One request and how it must end."""

    index: int
    kind: str
    body: Body
    end: End = "finished"
    path: str = "/generate"
    pattern: str | None = None  # what a reply that ends by itself matches as a whole
    abort_after_s: float = 0.0
    chunks_read: int = 0  # of a stream whose client then goes away

    @property
    def name(self) -> str:
        return f"request {self.index} ({self.kind})"

    @property
    def is_greedy(self) -> bool:
        return self.end == "finished" and self.body["sampling_params"]["temperature"] == 0


class PromptSource:
    """Prompts as token lists: questions, conversations with a shared history, text, noise."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        rng = random.Random(f"prompts {seed}")
        self._tokenizer = tokenizer
        self._vocab_size = min(tokenizer.vocab_size, 4000)
        self._histories = [
            [text for _ in range(rng.randint(1, 4)) for text in _question_and_answer(rng)]
            for _ in range(NUM_SHARED)
        ]
        texts = [text for _ in range(600) for text in _question_and_answer(rng)]
        self._text = tokenizer.encode("\n".join(texts), add_special_tokens=False)

    def draw(self, rng: random.Random) -> list[int]:
        kind = rng.choices(("question", "shared", "text", "noise"), (35, 35, 20, 10))[0]
        if kind == "text":
            length = int(MAX_PROMPT_TOKENS ** rng.random())
            start = rng.randrange(len(self._text) - length)
            return self._text[start : start + length]
        if kind == "noise":
            return [rng.randrange(self._vocab_size) for _ in range(rng.randint(1, 40))]
        history = rng.choice(self._histories) if kind == "shared" else []
        return self._conversation([*history, _question_and_answer(rng)[0]])

    def _conversation(self, messages: list[str]) -> list[int]:
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        text = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        return self._tokenizer.encode(str(text), add_special_tokens=False)[-MAX_PROMPT_TOKENS:]


def _question_and_answer(rng: random.Random) -> tuple[str, str]:
    return rng.choice((maths.sample, chat.sample))(rng)


SAMPLING: tuple[Body, ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.02},
)
STOPS = ("\n\n", " the", "####", ".", "is")
WORDS = r"[A-Z][a-z]{2,8}( [a-z]{2,8}){1,12}\."
PATTERNS = (r"(yes|no), [a-z]{4,9} [0-9]{3}", r"#### [0-9]{1,4}", WORDS)
EBNF = 'root ::= number " " sign " " number\nsign ::= "+" | "-" | "*"\nnumber ::= [0-9]+'
EBNF_PATTERN = r"[0-9]+ [-+*] [0-9]+"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,12}$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
JSON_PATTERN = r'\{\s*"name"\s*:\s*"[a-z]{3,12}"\s*,\s*"count"\s*:\s*[0-9]{1,4}\s*\}'
PENALTIES: tuple[Body, ...] = (
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.8},
    {"repetition_penalty": 1.2},
    {"min_new_tokens": 1},  # no more than the shortest reply asked for
)
# What SGLang refuses, whatever runs beside it.
MALFORMED: tuple[tuple[str, Body], ...] = (
    ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": "many"}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"temperature": -1}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"top_p": 2}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"nonsense": 1}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"regex": "(["}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"json_schema": "{not json"}}),
    ("/generate", {"input_ids": [5], "sampling_params": {"regex": "a+", "ebnf": EBNF}}),
    ("/generate", {"input_ids": [5, 10**9], "sampling_params": {}}),
    ("/generate", {"input_ids": [-1, 5], "sampling_params": {}}),
    ("/generate", {"input_ids": [], "sampling_params": {}}),
    ("/generate", {"input_ids": [5] * 100_000, "sampling_params": {}}),
    ("/v1/chat/completions", {"model": "default"}),
    ("/v1/chat/completions", {"model": "default", "messages": [{"role": 3, "content": "Hi."}]}),
)


class RequestMix:
    """``job(i)`` is the i-th request of the mix. ``penalties`` adds what counts emitted tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int, penalties: bool = False
    ) -> None:
        self._seed = seed
        self._prompts = PromptSource(tokenizer, seed)
        self._kinds: dict[str, tuple[int, Callable[[Job, random.Random], Job]]] = {
            "greedy": (28, _unchanged),
            "stop string": (8, _with_stop),
            "log-probabilities": (8, _with_logprobs),
            "two of one prompt": (4, _with_parameters(n=2)),
            "streamed": (8, _streamed),
            "regex": (6, _with_regex),
            "JSON schema": (4, _with_json_schema),
            "EBNF": (3, _with_ebnf),
            "sampled": (13, _sampled),
            "aborted": (6, _aborted),
            "client gone": (6, _client_gone),
            "malformed": (6, _malformed),
        }
        if penalties:
            self._kinds["penalised"] = (8, _penalised)

    def job(self, index: int) -> Job:
        rng = random.Random(f"{self._seed} {index}")
        weights = [weight for weight, _ in self._kinds.values()]
        kind = rng.choices(list(self._kinds), weights)[0]
        parameters: Body = {"temperature": 0, "max_new_tokens": rng.randint(1, MAX_NEW_TOKENS)}
        if rng.random() < 0.5:
            parameters["ignore_eos"] = True
        body = {"input_ids": self._prompts.draw(rng), "sampling_params": parameters}
        return self._kinds[kind][1](Job(index, kind, body), rng)


def _changed(job: Job, body: Body | None = None, **fields: Any) -> Job:
    return Job(**{**vars(job), "body": {**job.body, **(body or {})}, **fields})


def _with(job: Job, parameters: Body, **fields: Any) -> Job:
    merged = {**job.body["sampling_params"], **parameters}
    return _changed(job, {"sampling_params": merged}, **fields)


def _with_parameters(**parameters: Any) -> Callable[[Job, random.Random], Job]:
    return lambda job, rng: _with(job, parameters)


def _unchanged(job: Job, rng: random.Random) -> Job:
    return job


def _with_stop(job: Job, rng: random.Random) -> Job:
    return _with(job, {"stop": rng.sample(STOPS, rng.randint(1, 3))})


def _with_logprobs(job: Job, rng: random.Random) -> Job:
    start = 0 if rng.random() < 0.3 else -1
    options = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
    return _changed(job, options)


def _streamed(job: Job, rng: random.Random) -> Job:
    return _changed(job, {"stream": True})


def _sampled(job: Job, rng: random.Random) -> Job:
    return _with(job, rng.choice(SAMPLING))


def _constrained(job: Job, rng: random.Random, grammar: Body, pattern: str) -> Job:
    """Greedy or sampled; the grammar says where the reply ends."""
    sampling = {} if rng.random() < 0.7 else rng.choice(SAMPLING)
    return _with(job, {**sampling, **grammar, "ignore_eos": False}, pattern=pattern)


def _with_regex(job: Job, rng: random.Random) -> Job:
    pattern = rng.choice(PATTERNS)
    return _constrained(job, rng, {"regex": pattern}, pattern)


def _with_json_schema(job: Job, rng: random.Random) -> Job:
    return _constrained(job, rng, {"json_schema": json.dumps(SCHEMA)}, JSON_PATTERN)


def _with_ebnf(job: Job, rng: random.Random) -> Job:
    return _constrained(job, rng, {"ebnf": EBNF}, EBNF_PATTERN)


def _penalised(job: Job, rng: random.Random) -> Job:
    return _with(job, rng.choice(PENALTIES))


def _aborted(job: Job, rng: random.Random) -> Job:
    """Its name has a fixed width: SGLang aborts every request whose name begins so."""
    delay = rng.random() ** 2 * MAX_ABORT_DELAY_S
    body = {"rid": f"aborted-{job.index:08d}"}
    long = _with(job, {"ignore_eos": True, "max_new_tokens": MAX_NEW_TOKENS})
    return _changed(long, body, end="aborted", abort_after_s=delay)


def _client_gone(job: Job, rng: random.Random) -> Job:
    chunks = rng.randint(0, MAX_CHUNKS_READ)
    return _changed(job, {"stream": True}, end="disconnected", chunks_read=chunks)


def _malformed(job: Job, rng: random.Random) -> Job:
    path, body = rng.choice(MALFORMED)
    return Job(job.index, job.kind, body, end="refused", path=path)


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text.strip()) is not None
