"""`sglang-ascend chat` beside the same request made by hand, on servers with and without MTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_server import LaunchedServer
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from typer.testing import CliRunner, Result

from sglang_ascend.cli import app

QUESTION = "Tom has 12 apples and gives away 5. How many are left?"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


@pytest.fixture
def pair(servers: ServerPool, model_folder: Path) -> list[LaunchedServer]:
    return servers.get(*plain_and_mtp(model_folder))


def ask(*words: str, stdin: str = "") -> Result:
    result = CliRunner().invoke(app, list(words), input=stdin)
    assert result.exit_code == 0, result.output
    return result


def test_chat_prints_the_reply_and_what_the_server_says_of_it(pair, tokenizer, model):
    turns = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    (expected,) = pair[1].generate([prompt], {"temperature": 0, "max_new_tokens": 48})
    for server in pair:
        words = ["chat", "--url", server.url, "--temperature", "0", "--max-new-tokens", "48"]
        result = ask(*words, stdin=QUESTION)
        assert result.stdout == f"{expected.text}\n"
        line = result.stderr
        assert line.startswith(f"{len(expected.tokens)} tokens in ")
    histogram = expected.meta["spec_correct_drafts_histogram"]
    forwards, accepted = sum(histogram), expected.meta["spec_num_correct_drafts"]
    assert forwards == expected.meta["spec_verify_ct"]
    assert f"| {1 + accepted / forwards:.2f} tokens per forward |" in line
    first = f"accepted at draft 1 to 3: {1 - histogram[0] / forwards:.2f}, "
    assert first in line
    assert ask("chat", QUESTION, "--url", pair[0].url).stderr.endswith("| no speculation\n")
