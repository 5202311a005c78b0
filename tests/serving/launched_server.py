"""One `python -m sglang.launch_server` process with this plugin, and its HTTP client."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.server import LAUNCH, ServerProcess

REQUEST_TIMEOUT_S = 900

Tokens = Sequence[int]


@dataclass(frozen=True)
class ServerConfig:
    """What is served and how; equal configurations share one process."""

    model_path: Path
    mtp: bool
    dtype: str = "float32"
    page_size: int = 1
    flags: tuple[str, ...] = ()
    python_path: Path | None = None  # a folder whose sitecustomize.py runs in every process
    variables: tuple[tuple[str, str], ...] = ()  # of the environment
    program: tuple[str, ...] = LAUNCH

    def arguments(self) -> list[str]:
        arguments = ["--model-path", str(self.model_path), "--dtype", self.dtype]
        arguments += ["--page-size", str(self.page_size)]
        # Two servers share two cores: an idle scheduler must not spin. One log line a step.
        arguments += ["--sleep-on-idle", "--decode-log-interval", "1", *self.flags]
        return [*arguments, *(["--speculative-algorithm", "MTP"] if self.mtp else [])]

    def environment(self) -> dict[str, str]:
        environment = {"OMP_NUM_THREADS": "1", **dict(self.variables)}
        if self.python_path is not None:
            environment["PYTHONPATH"] = str(self.python_path)
        return environment


@dataclass(frozen=True)
class Logprobs:
    """Rows of one sequence: the token of each, its log-probability, the k most likely ones."""

    tokens: list[int]
    values: list[float]
    top: list[dict[int, float]]

    @classmethod
    def from_meta(cls, meta: dict[str, Any], kind: str) -> Logprobs:
        """Rows without a prediction (the first token of a prompt) are left out."""
        rows = meta.get(f"{kind}_token_logprobs") or []
        top = meta.get(f"{kind}_top_logprobs") or [None] * len(rows)
        kept = [
            (token, value, {t: p for p, t, _ in best or ()})
            for (value, token, _), best in zip(rows, top, strict=True)
            if value is not None
        ]
        return cls(*([row[i] for row in kept] for i in range(3)))


@dataclass(frozen=True)
class Reply:
    """One finished request."""

    tokens: list[int]
    text: str
    meta: dict[str, Any]
    prompt_logprobs: Logprobs = field(repr=False)
    output_logprobs: Logprobs = field(repr=False)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Reply:
        meta = body["meta_info"]
        return cls(
            body["output_ids"],
            body["text"],
            meta,
            Logprobs.from_meta(meta, "input"),
            Logprobs.from_meta(meta, "output"),
        )

    @property
    def cached_tokens(self) -> int:
        return self.meta["cached_tokens"]


class LaunchedServer(ServerProcess):
    """A running server and its client."""

    def __init__(self, config: ServerConfig, log_path: Path) -> None:
        self.config = config
        super().__init__(config.arguments(), log_path, config.program, config.environment())

    def logged_batch_sizes(self, kind: str) -> list[int]:
        """Requests of every logged "Decode" batch, or new sequences of every "Prefill" one."""
        count = {"Decode": r"#running-req: (\d+)", "Prefill": r"#new-seq: (\d+)"}[kind]
        return [int(n) for n in re.findall(rf"{kind} batch, {count}", self.log())]

    def logged_prefill_tokens(self) -> list[int]:
        """Computed (not cached) tokens of every logged prefill batch."""
        return [int(n) for n in re.findall(r"Prefill batch.*?#new-token: (\d+)", self.log())]

    def post(self, path: str, **body: Any) -> requests.Response:
        try:
            return requests.post(f"{self.url}{path}", json=body, timeout=REQUEST_TIMEOUT_S)
        except requests.RequestException as error:
            raise RuntimeError(f"{error}; the server's last lines:\n{self.log_tail()}") from error

    def info(self) -> dict[str, Any]:
        return requests.get(f"{self.url}/server_info", timeout=REQUEST_TIMEOUT_S).json()

    def generate(
        self,
        prompts: Sequence[Tokens],
        sampling: dict[str, Any] | list[dict[str, Any]],
        **fields: Any,
    ) -> list[Reply]:
        """All prompts as one batched request, `sampling` for each or one for all."""
        body = {"input_ids": [list(p) for p in prompts], "sampling_params": sampling, **fields}
        response = self.post("/generate", **body)
        if response.status_code != 200:
            raise RuntimeError(
                f"HTTP {response.status_code}: {response.text[:1000]}\n{self.log_tail()}"
            )
        return [Reply.from_json(item) for item in response.json()]

    def generate_each(
        self, prompts: Sequence[Tokens], sampling: dict[str, Any], concurrency: int, **fields: Any
    ) -> list[Reply]:
        """One request for each prompt, at most `concurrency` of them at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda p: self.generate([p], sampling, **fields)[0], prompts))

    def update_weights(self, folder: Path) -> None:
        """Serves the weights of `folder` from now on, once no request runs."""
        self.flush_cache()
        response = self.post("/update_weights_from_disk", model_path=str(folder))
        assert response.status_code == 200 and response.json()["success"], response.text

    def samples(self) -> list[Sample]:
        """Of ``/metrics``, where the server has them (``--enable-metrics``)."""
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]

    def flush_cache(self) -> None:
        """Empties the radix cache once nothing runs: a reply is sent before its last step ends."""
        response = self.post("/flush_cache?timeout=60")
        if response.status_code != 200:
            raise RuntimeError(f"flush_cache: HTTP {response.status_code}: {response.text}")


def greedy(max_new_tokens: int) -> dict[str, Any]:
    """Sampling parameters of a greedy request of fixed length."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
