"""50 prompts by each deployment of several ranks on emulated NPUs: whatever the ranks share, each
request has transformers' greedy tokens in every rank that serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from greedy_oracle import Oracle

from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, tokens_per_step
from npu_emulation.sglang_runs import FUSED_ATTENTION, prompt, requests, served
from npu_emulation.test_attention_ranks import TWO
from npu_emulation.test_expert_parallel import DEEPEP, ENVIRON
from npu_emulation.test_mtp_fifty_prompts import MAX_SECONDS, NUM_PROMPTS, NUM_TOKENS, prompts_of
from sglang_ascend.models.catalog import model_path

GRAPH_OF_8 = ("--cuda-graph-bs-decode", "8")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAX_SECONDS + 600)]


@dataclass(frozen=True)
class Deployment:
    flags: tuple[str, ...]
    environ: dict[str, str]
    num_groups: int = 1  # of ranks with requests of their own


DEPLOYMENTS = {
    "experts": Deployment(DEEPEP, ENVIRON),
    "data-parallel attention": Deployment(TWO, FUSED_ATTENTION, num_groups=2),
    "four ranks": Deployment(("--tp-size", "4"), FUSED_ATTENTION),
}


SERVED = [(deployment, "random") for deployment in DEPLOYMENTS]
# Four ranks do not divide its six heads.
SERVED += [(deployment, "nano-deepseek") for deployment in DEPLOYMENTS if "four" not in deployment]


@pytest.mark.parametrize(("deployment", "model"), SERVED)
def test_fifty_prompts_have_transformers_tokens(deployment, model, guessable: Path):
    how = DEPLOYMENTS[deployment]
    folder = guessable if model == "random" else model_path(model)
    prompts = [prompt(5 + 2 * seed, seed) for seed in range(NUM_PROMPTS)]
    if model != "random":
        prompts = prompts_of(folder)
    wave = [
        request | {"attention_group": number % how.num_groups}
        for number, request in enumerate(requests(prompts, max_new_tokens=NUM_TOKENS))
    ]
    flags = (*how.flags, *GRAPH_OF_8, *MTP, *SHORT_CONTEXT)
    report = served(folder, [wave], flags, how.environ, timeout=MAX_SECONDS)
    oracle = Oracle(folder)
    for rank, each in enumerate([report, *report.other_ranks]):
        own = prompts[rank :: how.num_groups] if how.num_groups > 1 else prompts
        assert [len(tokens) for tokens in each.tokens] == [NUM_TOKENS] * len(own)
        said = oracle.summary(own, each.tokens)
        print(f"{deployment}, {model}, rank {rank}: {said}; {tokens_per_step(each):.2f} a step")
        oracle.check_greedy(own, each.tokens)
