"""A request's thinking budget is kept to the token, and changes no other reply.

The oracle is SGLang's plain server without overlap, which calls its budget on each token.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launched_server import LaunchedServer, Reply, greedy
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import conversation
from widened import END, START, check_used, sglangs_budget, widen

from sglang_ascend.models.catalog import model_path

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]
SAMPLING = Path(__file__).parents[2] / "docs" / "sampling.md"
ENABLED = ("--enable-custom-logit-processor",)
NEW_TOKENS = 40
BUDGETS = (0, 1, 2, 3, 5, 8, 13, 21, None)


@pytest.fixture(scope="module")
def widened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("widened") / "nano-deepseek"
    return widen(model_path("nano-deepseek"), folder)


@pytest.fixture
def pair(servers: ServerPool, model: str, widened: Path) -> list[LaunchedServer]:
    plain, mtp = plain_and_mtp(widened, mtp_flags=ENABLED)
    return servers.get(
        replace(plain, flags=(*plain.flags, *ENABLED, "--disable-overlap-schedule")), mtp
    )


def ask(
    server: LaunchedServer, prompts: list[list[int]], budgets: list[int | None], **sampling: Any
) -> list[Reply]:
    samplings = [
        greedy(NEW_TOKENS) | {"ignore_eos": True, "custom_params": {"thinking_budget": budget}}
        for budget in budgets
    ]
    processors = [None if budget is None else sglangs_budget() for budget in budgets]
    return server.generate(
        prompts, [one | sampling for one in samplings], custom_logit_processor=processors
    )


# A draw from as many tokens as the widened model has takes long.
@pytest.mark.parametrize(
    ("sampling", "num_requests"), [({}, 36), ({"temperature": 0.7, "top_p": 0.9}, 18)]
)
def test_a_budget_is_kept_to_the_token_as_without_speculation(
    pair: list[LaunchedServer],
    tokenizer,
    held_out_prompts,
    sampling: dict[str, float],
    num_requests: int,
) -> None:
    texts = held_out_prompts["maths"][:num_requests]
    prompts = [[*conversation(tokenizer, text), START] for text in texts]
    budgets = [BUDGETS[i % len(BUDGETS)] for i in range(len(prompts))]
    seeds = {"sampling_seed": 7} if sampling else {}
    plain, mtp = ask_both(pair, lambda server: ask(server, prompts, budgets, **sampling, **seeds))
    assert [reply.tokens for reply in mtp] == [reply.tokens for reply in plain]
    assert tokens_per_step(mtp) > 1.5, "else rows behind the first were never judged"
    for reply, budget in zip(mtp, budgets, strict=True):
        if budget is None:
            assert END not in reply.tokens
        else:
            check_used(reply.tokens, budget)
    # The control: without a budget they think on.
    (free,) = ask_both(pair[1:], lambda server: ask(server, prompts, [None] * len(prompts)))
    assert all(END not in reply.tokens for reply in free)


def test_another_processor_is_refused_and_the_server_goes_on(
    pair: list[LaunchedServer], tokenizer
) -> None:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    prompt = conversation(tokenizer, "What is 3 + 4?")
    for processor in (DisallowedTokensLogitsProcessor().to_str(), "{}"):
        body = {"input_ids": prompt, "custom_logit_processor": processor}
        answer = pair[1].post("/generate", **body, sampling_params=greedy(4))
        assert answer.status_code == 400
        assert "DeepSeekR1ThinkingBudgetLogitProcessor" in answer.json()["error"]["message"]
    plain, mtp = ask_both(pair, lambda server: server.generate([prompt], greedy(8)))
    assert plain[0].tokens == mtp[0].tokens


def test_the_documented_request_is_served(pair: list[LaunchedServer]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", SAMPLING.read_text(), re.DOTALL)
    known: dict[str, Any] = {}
    exec(program.replace("http://127.0.0.1:30000", pair[1].url), known)
    assert known["reply"].usage.completion_tokens > 0
