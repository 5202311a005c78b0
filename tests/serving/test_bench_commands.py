"""`sglang-ascend chat` and `bench` beside the servers' own figures, with and without MTP."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

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


def test_bench_gives_the_figures_of_both_servers(pair, model, tmp_path):
    words = ["--max-new-tokens", "16", "--num-prompts", "1", "--task", "qa", "--task", "copy"]
    words += ["--out", str(tmp_path / "bench"), "--json"]
    urls = ["--url", pair[1].url, "--plain-url", pair[0].url]
    report = json.loads(ask("bench", *urls, *words).stdout)
    assert report == json.loads((tmp_path / "bench.json").read_text())
    ElementTree.fromstring((tmp_path / "bench.svg").read_text())
    told = report["servers"]["mtp"]
    assert (told["speculative_algorithm"], told["speculative_num_steps"]) == ("MTP", 3)
    assert report["servers"]["plain"]["speculative_algorithm"] is None
    assert list(report["tasks"]) == ["qa", "copy"]
    for row in report["rounds"]:
        plain, mtp = row["samples"]["plain"], row["samples"]["mtp"]
        assert plain["histogram"] is None and len(mtp["histogram"]) == 4
        # float32 servers of the same replies; the last forward may accept past the end
        assert plain["tokens"] == mtp["tokens"] <= 16
        emitted = sum((n + 1) * count for n, count in enumerate(mtp["histogram"]))
        assert 0 <= emitted - (mtp["tokens"] - 1) <= 3

    both = ["--compare", pair[0].url, pair[1].url]
    compared = json.loads(ask("bench", *both, *words).stdout)
    assert list(compared["servers"]) == ["a", "b"]
    alone = json.loads(ask("bench", "--url", pair[1].url, *words).stdout)
    assert alone["baseline"] is None and "speedup" not in alone["mean"]
    greedy = alone["acceptance"]["mtp"]["per_position"][0]
    hot = ["--url", pair[1].url, *words, "--temperature", "9"]  # all but uniform draws
    drawn = json.loads(ask("bench", *hot).stdout)
    assert drawn["temperature"] == 9 and drawn["acceptance"]["mtp"]["per_position"][0] < greedy
