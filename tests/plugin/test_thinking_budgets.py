"""A thinking budget is kept on every verified row as SGLang's processor keeps it on one token.

The oracle is SGLang's class, called on each row with the tokens that come before that row.
"""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import dill
import pytest
import torch

pytestmark = pytest.mark.sglang

VOCAB_SIZE = 151_800
PROMPT_LENGTH, REPLY_LENGTH, WIDTH = 4, 150, 4


def served_class(name: str) -> Any:
    from sglang.srt.sampling import custom_logit_processor

    return getattr(custom_logit_processor, name)


QWEN, DEEPSEEK = "Qwen3ThinkingBudgetLogitProcessor", "DeepSeekR1ThinkingBudgetLogitProcessor"


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request_of(name: str | None, budget: Any, tokens: list[int]) -> Request:
    params = None if budget is None else {"thinking_budget": budget}
    return Request(
        custom_logit_processor=None if name is None else served_class(name)().to_str(),
        sampling_params=SimpleNamespace(custom_params=params),
        origin_input_ids=tokens[:PROMPT_LENGTH],
        output_ids=[],
        tokens=tokens,
        name=name,
    )


def tokens_of(name: str, generator: torch.Generator) -> list[int]:
    """Prompt and reply that often begin and end thinking, and often have a new line."""
    model = served_class(name)
    marks = (model.THINKING_START_TOKEN_ID, model.THINKING_END_TOKEN_ID, model.NEW_LINE_TOKEN_ID)
    kinds = torch.tensor([*marks, 9, 11])[
        torch.multinomial(
            torch.tensor([0.05, 0.03, 0.2, 0.36, 0.36]),
            PROMPT_LENGTH + REPLY_LENGTH,
            replacement=True,
            generator=generator,
        )
    ]
    return kinds.tolist()


def expected(request: Request, logits: torch.Tensor, num_output: int) -> torch.Tensor:
    """Of one row, behind so many tokens of the reply."""
    if request.name is None:
        return logits
    tokens = request.tokens[: PROMPT_LENGTH + num_output]
    prompt, output = tokens[:PROMPT_LENGTH], tokens[PROMPT_LENGTH:]
    known = SimpleNamespace(origin_input_ids=prompt, output_ids=output)
    params = request.sampling_params.custom_params
    processor = served_class(request.name)()
    row = logits.clone()[None]
    return processor(row, [None if params is None else params | {"__req__": known}])[0]


def batch_of(requests: list[Request], rows: list[int]) -> Any:
    return SimpleNamespace(
        reqs=requests, req_pool_indices=torch.tensor(rows), decoding_reqs=None, device="cpu"
    )


def test_every_row_is_as_sglangs_processor_leaves_it_behind_the_same_tokens() -> None:
    from sglang_ascend.plugin.mtp.sampling.thinking_budgets import RequestBudgets

    generator = torch.Generator().manual_seed(0)
    asked = [(QWEN, 0), (DEEPSEEK, 1), (QWEN, 3), (DEEPSEEK, 6), (QWEN, -1), (QWEN, 2**70)]
    asked += [(DEEPSEEK, None), (QWEN, "7")]
    requests = [request_of(*of, tokens_of(of[0], generator)) for of in asked]
    requests.append(request_of(None, 0, tokens_of(QWEN, generator)))
    batch = batch_of(requests, list(reversed(range(len(requests)))))
    budgets = RequestBudgets(len(requests), "cpu")
    budgets.prefill(batch)

    logits = torch.randn(VOCAB_SIZE, generator=generator)
    done, forced, late = [0] * len(requests), set(), 0
    while max(done) + WIDTH <= REPLY_LENGTH:
        candidates = torch.tensor(
            [
                request.tokens[PROMPT_LENGTH + at :][:WIDTH]
                for request, at in zip(requests, done, strict=True)
            ]
        )
        rows = logits.expand(len(requests), WIDTH, -1).clone()
        budgets.apply(batch, rows, candidates)
        for i, request in enumerate(requests):
            for j in range(WIDTH):
                one = expected(request, logits, done[i] + j + 1)
                assert torch.equal(rows[i, j], one)
                late += not torch.equal(rows[i, j], expected(request, logits, done[i] + j))
                if one.isinf().any():
                    forced.add((i, int(one.argmax())))
        kept = torch.randint(1, WIDTH + 1, (len(requests),), generator=generator)
        budgets.advance(batch.req_pool_indices, candidates, kept)
        done = [at + k for at, k in zip(done, kept.tolist(), strict=True)]
    # Both tokens were forced on each of the four that have a budget, and on no other.
    assert {i for i, _ in forced} == {0, 1, 2, 3} and len(forced) == 8
    assert late > 20, "what follows one token less, the control, would have been the same"


def test_a_retracted_request_goes_on_with_what_it_had_used_up() -> None:
    from sglang_ascend.plugin.mtp.sampling.thinking_budgets import RequestBudgets

    start = served_class(QWEN).THINKING_START_TOKEN_ID
    request = request_of(QWEN, 3, [9, 9, 9, start, 11, 11, 11, 11])
    for num_output in range(1, 4):
        request.output_ids = request.tokens[PROMPT_LENGTH:][: num_output - 1]
        budgets, batch = RequestBudgets(1, "cpu"), batch_of([request], [0])
        budgets.prefill(batch)
        logits = torch.zeros(1, 1, VOCAB_SIZE)
        budgets.apply(batch, logits, torch.tensor([[11]]))
        assert bool(logits.isinf().any()) == (num_output == 3)


class OfAUser:
    """A processor by value or by name of another module."""


def refused(**fields: Any) -> str:
    from sglang_ascend.plugin.mtp.sampling.served_budgets import refuse_unserved_processor

    sent = {"custom_logit_processor": served_class(QWEN)().to_str(), "sampling_params": {}}
    try:
        refuse_unserved_processor(SimpleNamespace(**sent | fields), 151_936)
    except ValueError as error:
        return str(error)
    return ""


def serialized(pickled: bytes) -> str:
    return json.dumps({"callable": pickled.hex()})


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_budget_is_served_in_whatever_protocol_it_is_sent(protocol: int) -> None:
    for name in (QWEN, DEEPSEEK, "Glm4MoeThinkingBudgetLogitProcessor"):
        sent = serialized(dill.dumps(served_class(name), protocol))
        assert refused(custom_logit_processor=sent) == ""


def test_what_is_no_budget_of_sglangs_is_refused_and_never_unpickled(tmp_path) -> None:
    class Touches:
        def __reduce__(self):
            return open, (str(tmp_path / "touched"), "w")

    begins = dill.dumps(served_class(QWEN))
    for sent in (
        served_class("DisallowedTokensLogitsProcessor")().to_str(),
        serialized(dill.dumps(served_class("ThinkingBudgetLogitProcessor"))),
        serialized(dill.dumps(OfAUser)),
        serialized(pickle.dumps(Touches())),
        serialized(begins + b"."),
        serialized(begins[:-1]),
        *("{}", "[]", "3", "no JSON", '{"callable": 5}', '{"callable": "no hex"}'),
    ):
        said = refused(custom_logit_processor=sent)
        assert said.startswith("custom_logit_processor must be") and QWEN in said
    assert not list(tmp_path.iterdir())


def test_a_budget_that_would_be_ignored_is_refused() -> None:
    from sglang_ascend.plugin.mtp.sampling.served_budgets import refuse_unserved_processor

    assert "custom_params" in refused(sampling_params={"custom_params": ["thinking_budget"]})
    for budget in ("512", 5.5, [3]):
        params = {"custom_params": {"thinking_budget": budget}}
        assert f"thinking_budget is {budget!r}" in refused(sampling_params=params)
    for budget in (None, -1, 0, 512, 2**70):
        assert refused(sampling_params={"custom_params": {"thinking_budget": budget}}) == ""
    assert refused(sampling_params=None) == ""
    request = SimpleNamespace(
        custom_logit_processor=served_class(QWEN)().to_str(), sampling_params={}
    )
    with pytest.raises(ValueError, match="this one has 4096"):
        refuse_unserved_processor(request, 4096)
