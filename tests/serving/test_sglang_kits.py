"""SGLang's own test kits against a server started with MTP: what a user of SGLang may combine with
speculation works as it does without.

A kit's attributes are its settings: lengths are cut to what two cores serve within its timeouts.
Its tests are unchanged, but for three whose grammar lets a small model fail, speculation or not.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_pairs import TEST_TIMEOUT_S
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import SpecLogprobKit

from benchmarks.server import LAUNCH, ServerProcess
from sglang_ascend.models.catalog import model_path

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]

# Seconds after which a waiting, or a running, request is given up.
WAITING_TIMEOUT, RUNNING_TIMEOUT = "0.5", "3"

LOG_ENTRY = r"^\[2024-01-01T12:00:00Z\] INFO: System\.process - Operation [a-z]{1,12} successfully$"
LOG_GRAMMAR = """
root ::= logentry
logentry ::= "[" datetime "] " level ": System.process - " message
datetime ::= "2024-01-01T12:00:00Z"
level ::= "INFO"
message ::= "Operation " [a-z]{1,12} " successfully"
"""
PERSON = (
    r'^{ ?"name" ?: ?"[a-zA-Z0-9 ]{1,16}" ?, ?"age" ?: ?[1-9][0-9]{0,2} ?, '
    r'?"city" ?: ?"[a-zA-Z0-9 ]{1,16}" ?}$'
)
PERSON_GRAMMAR = r"""
root ::= object
object ::= "{" ws name ws "," ws age ws "," ws city ws "}"
name ::= "\"name\"" ws ":" ws string
age ::= "\"age\"" ws ":" ws number
city ::= "\"city\"" ws ":" ws string
string ::= "\"" [a-zA-Z0-9 ]{1,16} "\""
number ::= [1-9] [0-9]{0,2}
ws ::= [ ]?
"""


def running_server(
    folder: Path, model: str, *flags: str, **environment: str
) -> Iterator[ServerProcess]:
    """Started as a user starts it."""
    arguments = ("--model-path", str(model_path(model)), "--speculative-algorithm", "MTP", *flags)
    process = ServerProcess(arguments, folder / "server.log", LAUNCH, environment)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """In bf16 the reply to one of the kits does not end, without speculation either."""
    folder = tmp_path_factory.mktemp("kits")
    yield from running_server(folder, "smollm2-mtp", "--dtype", "float32")


class Kit(unittest.TestCase):
    """What the mixins expect of the class that they are mixed into."""

    __test__ = False

    def use(self, server: ServerProcess) -> None:
        self.base_url = server.url
        self.model = "default"
        self.process: Any = server._process
        self.client = openai.Client(api_key="none", base_url=f"{server.url}/v1")


class TestKits(
    JSONConstrainedMixin,
    JSONModeMixin,
    RegexConstrainedMixin,
    EBNFConstrainedMixin,
    MatchedStopMixin,
    AbortAllMixin,
    BasicAPIContractMixin,
    Kit,
):
    __test__ = True
    # Unbounded, a model of this size writes digits of the population until its tokens run out.
    json_schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[\\w]+$"},
                "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
            },
            "required": ["name", "population"],
            "additionalProperties": False,
        }
    )
    abort_all_max_new_tokens = 4000

    def test_regex_generate_custom_log_format(self) -> None:
        """The kit's, whose [a-z]+ a model of this size may go on with until its tokens run out."""
        self._run_decode_regex(regex=LOG_ENTRY, prompt="Generate a log entry:", n=3)

    def test_ebnf_generate_custom_log_format(self) -> None:
        """The kit's, bounded as the regex above."""
        self._run_decode_ebnf(LOG_GRAMMAR, [LOG_ENTRY], "Generate a log entry:", n=3)

    def test_ebnf_generate_complex_json(self) -> None:
        """The kit's, whose grammar also has objects that its pattern refuses, such as those without
        a city: a model of this size writes one now and then, without speculation too."""
        prompt = "Generate a simple JSON with name, age, and city:"
        self._run_decode_ebnf(PERSON_GRAMMAR, [PERSON], prompt, n=3)

    @pytest.fixture(autouse=True)
    def connect(self, server: ServerProcess) -> None:
        self.use(server)


class TestKitsOnTheSmallModel(PauseResumeInPlaceMixin, SpecLogprobKit, Kit):
    """32 requests of 512 tokens within the kit's three minutes."""

    __test__ = True
    # The kit's own 0.5 is for bf16; this server computes in fp32.
    logprob_match_delta = 1e-3

    @pytest.fixture(scope="class")
    def small_server(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
        folder = tmp_path_factory.mktemp("small")
        yield from running_server(folder, "nano-deepseek", "--dtype", "float32")

    @pytest.fixture(autouse=True)
    def connect(self, small_server: ServerProcess) -> None:
        self.use(small_server)


class TestWaitingTimeout(WaitingTimeoutMixin, Kit):
    __test__ = True

    @pytest.fixture(autouse=True)
    def connect(self, tmp_path: Path) -> Iterator[None]:
        flags = ("--max-running-requests", "1")
        for server in running_server(
            tmp_path, "nano-deepseek", *flags, SGLANG_REQ_WAITING_TIMEOUT=WAITING_TIMEOUT
        ):
            self.use(server)
            yield


class TestRunningTimeout(RunningTimeoutTwoWaveMixin, Kit):
    __test__ = True

    @pytest.fixture(autouse=True)
    def connect(self, tmp_path: Path) -> Iterator[None]:
        for server in running_server(
            tmp_path, "smollm2-mtp", SGLANG_REQ_RUNNING_TIMEOUT=RUNNING_TIMEOUT
        ):
            self.use(server)
            yield


def test_a_conversation_finds_its_own_prefix(
    server: ServerProcess, tmp_path: Path, held_out_prompts: dict[str, list[str]]
) -> None:
    texts = [text for prompts in held_out_prompts.values() for text in prompts]
    conversations = [{"conversations": [{"value": text}, {"value": text}]} for text in texts]
    dataset = tmp_path / "conversations.json"
    dataset.write_text(json.dumps(conversations))
    run_multiturn_cache_hit_test(
        server.url,
        str(model_path("smollm2-mtp")),
        num_clients=4,
        request_length=128,
        output_length=16,
        dataset_path=str(dataset),
    )
