"""SGLang's own test kits, unchanged, against a server started with MTP: what a user of SGLang may
combine with speculation works as it does without.

A kit's attributes are its settings: lengths are cut to what two cores serve within its timeouts.
"""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

import pytest
from server_pairs import TEST_TIMEOUT_S
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin

from benchmarks.server import ServerProcess
from sglang_ascend.models.catalog import model_path

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    """Started as a user starts it."""
    arguments = ("--model-path", str(model_path("smollm2-mtp")), "--speculative-algorithm", "MTP")
    process = ServerProcess(arguments, tmp_path_factory.mktemp("kits") / "server.log")
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


class TestKits(
    JSONConstrainedMixin,
    RegexConstrainedMixin,
    EBNFConstrainedMixin,
    MatchedStopMixin,
    AbortAllMixin,
    BasicAPIContractMixin,
    unittest.TestCase,
):
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

    @pytest.fixture(autouse=True)
    def connect(self, server: ServerProcess) -> None:
        self.base_url = server.url
        self.model = "default"
        self.process: Any = server._process


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
