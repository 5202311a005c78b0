"""A server tells from its own acceptance that something is broken, and where a step's time goes.

The damage is real: an MTP layer with other weights, a verifier that keeps every draft. The first
costs speed alone, so its tokens stay those of a server without speculation.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from launched_server import LaunchedServer, Reply, greedy
from prometheus_client.samples import Sample
from safetensors.torch import load_file, save_file
from server_pairs import TEST_TIMEOUT_S, ask_both, broken_verifiers, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import lossless_mix
from step_trace import check_step, events_of, steps_of

from sglang_ascend.speculative.acceptance_watchdog import WINDOW
from sglang_ascend.speculative.timeline import PHASES

NUM_PROMPTS = 96
# Enough for a window even when every step emits K+1 tokens: 12 steps a prompt.
NEW_TOKENS = 48
EVERY_DRAFT_KEPT = "observed, every draft kept"
OTHER_WEIGHTS = "observed, other MTP weights"
NEXTN = "model.layers.4."
NUM_DRAFTS = 3
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,  # servers of their own
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


def with_other_mtp_weights(folder: Path, copy: Path) -> Path:
    """A checkpoint that is well-formed, and whose MTP layer was never trained."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.startswith(NEXTN) and tensor.is_floating_point():
            scale = tensor.float().std() if tensor.numel() > 1 else 1.0
            noise = torch.randn(tensor.shape, generator=generator) * scale
            tensors[name] = noise.to(tensor.dtype)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@dataclass(frozen=True)
class Outcome:
    """What one server said after the load."""

    expected: list[Reply]  # of the server without speculation, where there is one
    replies: list[Reply]
    seconds: float  # since before the servers started
    alarms: list[str]
    rates: list[str]  # of drafts accepted, as logged
    completion: dict  # counts of one more reply
    samples: list[Sample]
    trace: Path

    def value(self, name: str, **labels: str) -> float:
        (value,) = [
            sample.value
            for sample in self.samples
            if sample.name == f"sglang_ascend:{name}" and labels.items() <= sample.labels.items()
        ]
        return value

    def labels(self, name: str) -> dict[str, str]:
        return next(sample.labels for sample in self.samples if sample.name == name)

    def alarm_counts(self) -> dict[str, tuple[float, float]]:
        """How often it was raised, and whether it is on."""
        return {
            kind: (
                self.value(f"acceptance_{kind}_total"),
                self.value("acceptance_alarm", kind=kind),
            )
            for kind in ("collapsed", "perfect")
        }


def alarms_in(log: str) -> list[str]:
    return re.findall(r"acceptance length \d\.\d\d \(of .* drafted steps: .*", log)


@pytest.fixture
def outcome(
    servers: ServerPool, model_folder: Path, variant: str, tokenizer, held_out_prompts, tmp_path
) -> Outcome:
    """The same greedy load on a server that is observed and on one without speculation."""
    plain, mtp = plain_and_mtp(model_folder)
    if variant == EVERY_DRAFT_KEPT:
        mtp = broken_verifiers(model_folder)[0]
    flags = (*mtp.flags, "--enable-metrics")
    if variant == OTHER_WEIGHTS:
        draft = with_other_mtp_weights(model_folder, tmp_path / "draft")
        flags += ("--speculative-draft-model-path", str(draft))
    trace_folder = tmp_path / "trace"
    variables = (*mtp.variables, ("SGLANG_ASCEND_TRACE", str(trace_folder)))
    prompts = lossless_mix(tokenizer, held_out_prompts, NUM_PROMPTS)
    started = time.monotonic()
    mtp = replace(mtp, flags=flags, variables=variables)
    running = servers.get(*([mtp] if variant == EVERY_DRAFT_KEPT else [mtp, plain]))
    replies, *expected = ask_both(
        running, lambda server: server.generate_each(prompts, greedy(NEW_TOKENS), 16)
    )
    seconds = time.monotonic() - started
    (trace,) = trace_folder.iterdir()
    completion = completion_of(running[0], prompts[0])
    samples = samples_when_idle(running[0], trace)
    log = running[0].log()
    return Outcome(
        expected[0] if expected else [],
        replies,
        seconds,
        alarms_in(log),
        re.findall(r"Drafts accepted by position: .*", log),
        completion,
        samples,
        trace,
    )


def completion_of(server: LaunchedServer, prompt: list[int]) -> dict:
    """What a reply of an OpenAI path says of its drafts."""
    asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = server.post(
        "/v1/completions", model="default", return_spec_tokens_details=True, **asked
    ).json()
    return answer["sglext"]["spec_tokens_details"]


def samples_when_idle(server: LaunchedServer, trace: Path) -> list[Sample]:
    """Under overlap one more step runs after the last reply: both counts of steps must agree."""
    for _ in range(100):
        samples = server.samples()
        counted = phase_values(samples, "count").values()
        if set(counted) == {len(steps_of(events_of(trace)))}:
            return samples
        time.sleep(0.1)
    raise AssertionError(f"/metrics counts {counted} steps, the trace others")


def phase_values(samples: list[Sample], suffix: str) -> dict[str, float]:
    name = f"sglang_ascend:step_phase_seconds_{suffix}"
    return {sample.labels["phase"]: sample.value for sample in samples if sample.name == name}


@pytest.mark.parametrize("variant", ["observed"])
def test_a_healthy_server_raises_no_alarm_and_accounts_for_its_steps(
    outcome: Outcome, variant: str, model: str
) -> None:
    assert tokens(outcome.replies) == tokens(outcome.expected)
    assert outcome.alarms == []
    assert outcome.alarm_counts() == {"collapsed": (0, 0), "perfect": (0, 0)}

    steps = steps_of(events_of(outcome.trace))
    for step in steps:
        check_step(*step)
    num_rows = sum(step["args"]["batch_size"] for step, *_ in steps)
    assert num_rows >= sum(reply.meta["spec_verify_ct"] for reply in outcome.replies) > WINDOW
    seconds = phase_values(outcome.samples, "sum")
    assert list(seconds) == list(PHASES)
    for i, phase in enumerate(PHASES, start=1):
        traced = sum(step[i]["dur"] for step in steps) * 1e-6
        assert seconds[phase] == pytest.approx(traced, abs=1e-6 * len(steps))
        assert seconds[phase] > 0
    assert sum(seconds.values()) < outcome.seconds, "these are seconds, of steps in a row"
    assert outcome.labels("sglang_ascend:acceptance_collapsed_total") == outcome.labels(
        "sglang:spec_accept_length"
    )
    print({phase: f"{1e3 * value / len(steps):.2f} ms" for phase, value in seconds.items()})

    check_positions(outcome, num_rows)
    check_dashboard({sample.name for sample in outcome.samples})


def accepted_at_least(histogram: list[int]) -> list[int]:
    """docs/observability.md: draft k was accepted in sum(histogram[k:]) steps."""
    return [sum(histogram[k:]) for k in range(1, NUM_DRAFTS + 1)]


def check_positions(outcome: Outcome, num_rows: int) -> None:
    """The replies' own counts are the metrics' but for steps of requests that had just ended, which
    no reply has; and one line is logged for each batch here."""
    told = [reply.meta for reply in outcome.replies] + [outcome.completion]
    histogram = "spec_correct_drafts_histogram"
    assert outcome.completion[histogram] == outcome.replies[0].meta[histogram]
    by_position = [accepted_at_least(meta[histogram]) for meta in told]
    num_unseen = num_rows - sum(meta["spec_verify_ct"] for meta in told)
    for k, counts in enumerate(zip(*by_position, strict=True), start=1):
        assert outcome.value("drafts_total", position=str(k)) == num_rows
        accepted = outcome.value("accepted_drafts_total", position=str(k))
        assert sum(counts) <= accepted <= sum(counts) + num_unseen
    assert sum(map(sum, by_position)) == sum(meta["spec_num_correct_drafts"] for meta in told)
    assert len(outcome.rates) == len(steps_of(events_of(outcome.trace)))
    print(outcome.rates[-1])


def check_dashboard(served: set[str]) -> None:
    """Each panel of docs/grafana.json asks for series that this server has, and for all of ours."""
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"sglang(?:_ascend)?:\w+", target["expr"])
    }
    assert asked <= served
    assert {name for name in served if name.startswith("sglang_ascend:")} <= asked
    assert all(panel["targets"] and panel["title"] for panel in panels)


@pytest.mark.parametrize("variant", [OTHER_WEIGHTS])
def test_an_mtp_layer_with_other_weights_is_noticed_and_changes_no_token(
    outcome: Outcome, variant: str, model: str
) -> None:
    assert tokens(outcome.replies) == tokens(outcome.expected)
    print(outcome.alarms)
    (alarm,) = outcome.alarms
    assert "check --speculative-draft-model-path" in alarm
    assert outcome.alarm_counts() == {"collapsed": (1, 1), "perfect": (0, 0)}


@pytest.mark.parametrize("variant", [EVERY_DRAFT_KEPT])
def test_a_verifier_that_keeps_every_draft_is_noticed(
    outcome: Outcome, variant: str, model: str
) -> None:
    print(outcome.alarms)
    (alarm,) = outcome.alarms
    assert alarm.startswith("acceptance length 4.00 (of 1 to 4)")
    assert "verification keeps every draft" in alarm
    assert outcome.alarm_counts() == {"collapsed": (0, 0), "perfect": (1, 1)}


def tokens(replies: list[Reply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]
