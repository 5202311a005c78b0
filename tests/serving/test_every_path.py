"""No request ends the server: an empty and a malformed body to every path, by every method.

The paths are those that the server itself lists. After each it still gives the same tokens.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from launched_server import LaunchedServer, ServerConfig, greedy
from server_pairs import LIMITS, TEST_TIMEOUT_S
from server_pool import ServerPool

from sglang_ascend.models.catalog import model_path

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]

# With a key SGLang lets a request through to paths that it refuses altogether without one.
ADMIN_KEY = "of-this-test"
HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
PROMPT, NEW_TOKENS = [5, 6, 7], 4
REPLY_TIMEOUT_S = 60

BODIES = {
    "nothing": b"",
    "an empty object": b"{}",
    "half an object": b'{"input_ids": [1,',
    "no object": b"[]",
}
# What stays in effect until another path takes it back, which a reply has to wait for.
UNDONE_BY = {
    "/pause_generation": "/continue_generation",  # no request is run in between
    "/release_memory_occupation": "/resume_memory_occupation",  # weights and caches are let go
    "/begin_weight_update": "/end_weight_update",  # weights are kept open for loading
    "/start_profile": "/stop_profile",  # every operation is recorded
}
# A 500 that ends nothing: here SGLang's HTTP layer reads the body itself, and as a dict.
SERVER_ERRORS = {
    "/add_external_corpus": {"nothing", "half an object"},
    "/remove_external_corpus": {"nothing", "half an object", "no object"},
    "/v1/chat/completions": {"no object"},
    "/invocations": {"no object"},
}


class Operation(NamedTuple):
    method: str
    path: str


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def server(servers: ServerPool, traces: Path) -> LaunchedServer:
    """Of these tests alone: what a path left behind must not reach others."""
    config = ServerConfig(
        model_path("nano-deepseek"),
        mtp=True,
        flags=("--admin-api-key", ADMIN_KEY, *LIMITS),
        variables=(("SGLANG_TORCH_PROFILER_DIR", str(traces)),),
    )
    return servers.get(config)[0]


def operations(server: LaunchedServer) -> Iterator[Operation]:
    listed = requests.get(f"{server.url}/openapi.json", timeout=REPLY_TIMEOUT_S).json()["paths"]
    for path, methods in listed.items():
        for method in methods:
            yield Operation(method, re.sub(r"\{.*?\}", "nothing", path))


def send(server: LaunchedServer, operation: Operation, body: bytes) -> requests.Response:
    return requests.request(
        operation.method,
        f"{server.url}{operation.path}",
        data=body,
        headers=HEADERS,
        timeout=REPLY_TIMEOUT_S,
    )


def tokens_of(server: LaunchedServer) -> list[int]:
    return server.generate([PROMPT], greedy(NEW_TOKENS))[0].tokens


@pytest.mark.parametrize("body", BODIES)
def test_no_body_to_any_path_ends_the_server(server: LaunchedServer, body: str) -> None:
    expected = tokens_of(server)
    took_effect, server_errors = set(), set()
    for operation in operations(server):
        try:
            response = send(server, operation, BODIES[body])
            if response.ok and operation.path in UNDONE_BY:
                took_effect.add(operation.path)
                undo = Operation("post", UNDONE_BY[operation.path])
                assert send(server, undo, b"{}").ok, operation
            assert tokens_of(server) == expected, operation
        except (requests.RequestException, RuntimeError) as error:
            pytest.fail(f"{operation} ended the server: {error}\n{server.log_tail()}")
        if response.status_code >= 500:
            server_errors.add(operation.path)
    assert server_errors == {path for path, bodies in SERVER_ERRORS.items() if body in bodies}
    # An empty object is all that these ask for: each was in effect, and taken back.
    assert body != "an empty object" or took_effect == set(UNDONE_BY)


@pytest.mark.parametrize("method", ["get", "post"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/start_expert_distribution_record", "expert_distribution_recorder_mode"),
        ("/stop_expert_distribution_record", "expert_distribution_recorder_mode"),
        ("/dump_expert_distribution_record", "expert_distribution_recorder_mode"),
        ("/resume_memory_occupation", "ResumeMemoryOccupationReqInput failed with KeyError"),
        ("/stop_profile", "Profiling is not in progress"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(
    server: LaunchedServer, path: str, method: str, said: str
) -> None:
    response = send(server, Operation(method, path), b"{}")
    assert response.status_code == 400
    assert said in response.text


@pytest.mark.parametrize("num_steps", [None, 2])
def test_a_profile_that_could_not_be_written_is_refused(
    server: LaunchedServer, num_steps: int | None
) -> None:
    """With steps SGLang would write it between two batches, and end there."""
    expected = tokens_of(server)
    asked = json.dumps({"output_dir": "/dev/null/profile", "num_steps": num_steps})
    response = send(server, Operation("post", "/start_profile"), asked.encode())
    assert response.status_code == 400
    assert "output_dir /dev/null/profile cannot hold a profile" in response.text
    assert tokens_of(server) == expected
    refused = send(server, Operation("post", "/stop_profile"), b"")
    assert "Profiling is not in progress" in refused.text, "none was started"


@pytest.mark.parametrize(
    "fields", [{"profile_by_stage": True}, {"start_step": 1, "activities": ["MEM"]}]
)
def test_a_profile_that_would_fail_between_two_batches_is_refused(
    server: LaunchedServer, tmp_path: Path, fields: dict[str, Any]
) -> None:
    expected = tokens_of(server)
    asked = json.dumps({"output_dir": str(tmp_path), **fields}).encode()
    assert send(server, Operation("post", "/start_profile"), asked).status_code == 400
    assert tokens_of(server) == expected


def test_a_profile_of_the_decode_steps_is_written(server: LaunchedServer, tmp_path: Path) -> None:
    asked = json.dumps({"output_dir": str(tmp_path), "with_stack": False})
    assert send(server, Operation("post", "/start_profile"), asked.encode()).ok
    completion = {"model": "default", "prompt": "The capital of France is", "max_tokens": 4}
    assert server.post("/v1/completions", **completion).ok
    assert send(server, Operation("post", "/stop_profile"), b"").ok
    (trace,) = tmp_path.iterdir()
    assert trace.name.endswith("-TP-0.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "aten::embedding" in {event.get("name") for event in events}
