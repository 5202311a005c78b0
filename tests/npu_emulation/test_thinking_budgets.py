"""A thinking budget is kept on every drafted row on the emulated NPU, and nothing waits for it."""

from __future__ import annotations

import pytest
from greedy_oracle import Oracle
from widened import END, START, check_used, sglangs_budget, widen

from npu_emulation.mtp_runs import WAITS_AND_COPIES, served_by_mtp, tokens_per_step
from npu_emulation.report import Report
from npu_emulation.sglang_runs import prompt, requests

PROMPTS = [[*prompt(length, seed), START] for seed, length in enumerate((9, 14))]
BUDGETS, NEW_TOKENS = (3, 6), 24
FLAGS = ("--cuda-graph-bs-decode", "4", "--enable-custom-logit-processor")


@pytest.fixture(scope="module")
def folder(guessable, tmp_path_factory):
    return widen(guessable, tmp_path_factory.mktemp("widened") / "model")


@pytest.fixture(scope="module")
def report(folder) -> Report:
    """Requests without a budget, then with one."""
    free = requests(PROMPTS, max_new_tokens=NEW_TOKENS)
    asked = [
        {"custom_logit_processor": sglangs_budget()}
        | request
        | {
            "sampling_params": request["sampling_params"]
            | {"custom_params": {"thinking_budget": n}}
        }
        for request, n in zip(free, BUDGETS, strict=True)
    ]
    return served_by_mtp(folder, [free, asked], *FLAGS)


def test_a_budget_is_kept_and_all_else_is_transformers(folder, report):
    exact = Oracle(folder)
    exact.check_greedy(PROMPTS, report.tokens[:2])
    assert all(END not in tokens for tokens in report.tokens[:2])
    for tokens, output, budget in zip(PROMPTS, report.tokens[2:], BUDGETS, strict=True):
        check_used(output, budget)
        end = output.index(END)
        assert set(exact.greedy(tokens, output).wrong) == {end - 1, end}
    assert tokens_per_step(report) > 1.05


def test_a_step_with_budgets_waits_for_its_results_only(report):
    without, with_budgets = (
        {name: report.steady(wave).calls.get(name, 0) for name in WAITS_AND_COPIES}
        for wave in (0, 1)
    )
    assert with_budgets == without
