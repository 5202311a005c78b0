"""What steps cost, kept for the next start, which has the best K at once by it."""

from __future__ import annotations

import json
import os
from itertools import repeat
from pathlib import Path

import pytest
from test_adaptive import MACHINES, MAX_DRAFTS, Machine, mean, serve, shares
from typer.testing import CliRunner

from sglang_ascend.cli import app
from sglang_ascend.speculative.adaptive.controller import AdaptiveDrafts
from sglang_ascend.speculative.adaptive.costs import kept as kept_costs
from sglang_ascend.speculative.adaptive.costs.kept import KeptCosts, KeptCostsError, kept

LOADS = [(batch, context) for context in (64.0, 8000.0) for batch in (1, 16, 128)]
OF = {"--model-path": "nano"}


def served(machine: Machine, seed: int = 100) -> AdaptiveDrafts:
    drafts = AdaptiveDrafts(MAX_DRAFTS)
    for load in [*LOADS, *LOADS]:
        list(serve(drafts, machine, repeat(load, 600), seed))
    return drafts


def test_a_file_has_what_was_timed_and_nothing_that_was_guessed(tmp_path: Path):
    drafts = served(Machine())
    drafts.speedups(3, 64.0)  # a load that was never served
    path = tmp_path / "costs.json"
    kept_costs.write(path, kept(drafts.costs, OF))
    found = json.loads(path.read_text())
    assert found["of"] == OF
    assert {(load["batch"], load["context"]) for load in found["loads"]} == set(LOADS)
    for load in found["loads"]:
        for kind in load["kinds"]:
            seconds = Machine().seconds(load["batch"], load["context"], kind["drafts"])
            assert kind["ms"] / 1e3 == pytest.approx(seconds, rel=0.02)
            assert kind["verified"] == kind["drafts"] and kind["steps"] > 0


def test_what_is_restored_is_what_was_kept():
    costs = served(Machine()).costs
    restored = kept(costs, OF).restored()
    for batch, context in LOADS:
        before, behind = costs.of(batch, context), restored.of(batch, context)
        assert before.measured().keys() == behind.measured().keys()
        for kind in before.measured():
            assert behind.seconds(kind) == pytest.approx(before.seconds(kind))
            # It may have changed since.
            assert behind.deviation(kind, (9, 9)) >= kept_costs.CHANGED
    assert kept(restored, OF).loads[0].kinds[0].steps == kept(costs, OF).loads[0].kinds[0].steps


def first_steps(machine: Machine, known: KeptCosts | None, num_steps: int) -> list[float]:
    """Worth of the best K's, load by load from a start on."""
    worth = []
    for seed in range(4):
        costs = None if known is None else known.restored()
        drafts = AdaptiveDrafts(MAX_DRAFTS, costs=costs)
        worth.append(
            [mean(shares(serve(drafts, machine, repeat(load, num_steps), seed))) for load in LOADS]
        )
    return [mean(list(of_load)) for of_load in zip(*worth, strict=True)]


@pytest.mark.parametrize("name", [name for name in MACHINES if "noise" not in name])
def test_a_start_that_knows_what_steps_cost_has_the_best_k_at_once(name: str):
    machine = Machine(**{**vars(MACHINES[name]), "wanders": True})
    known = kept(served(machine).costs, OF)
    with_file, without = (first_steps(machine, costs, 150) for costs in (known, None))
    assert mean(with_file) >= 0.98 and min(with_file) >= 0.95, with_file
    # The control: nobody knows.
    assert mean(without) < mean(with_file) - 0.01, (without, with_file)


def test_a_machine_that_is_as_slow_again_is_no_other_one():
    machine = MACHINES["few cores"]
    known = kept(served(machine).costs, OF)
    slower = {name: 3 * getattr(machine, name) for name in ("weights", "per_row", "draft")}
    now = Machine(**{**vars(machine), **slower, "draft_row": 3 * machine.draft_row})
    assert min(first_steps(now, known, 150)) >= 0.96


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_costs_of_another_machine_are_unlearnt(seed: int):
    known = kept(served(MACHINES["few cores"], seed).costs, OF)
    assert min(first_steps(MACHINES["good drafts"], known, 2000)) >= 0.95


GOOD = {"drafts": 0, "verified": 0, "ms": 9.0, "deviation": 0.0, "steps": 5}


def content_of(**changed: object) -> str:
    load = {"batch": 1, "context": 64, "kinds": [GOOD | changed]}
    return json.dumps({"of": OF, "loads": [load]})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "the file"),
        ("[1]", "the file"),
        ('{"loads": []}', "of"),
        (content_of(ms=0.0), "ms"),
        (content_of(ms=float("nan")), "ms"),
        (content_of(ms="fast"), "ms"),
        (content_of(drafts=99), "drafts"),
        (content_of(steps=0), "steps"),
        (content_of(speed=1), "speed"),
    ],
)
def test_a_file_of_something_else_is_one_sentence(tmp_path: Path, text: str, where: str):
    path = tmp_path / "costs.json"
    path.write_text(content_of())
    assert kept_costs.read(path).loads[0].kinds[0].kind == (0, 0)
    path.write_text(text)
    with pytest.raises(KeptCostsError) as refusal:
        kept_costs.read(path)
    message = str(refusal.value)
    assert str(path) in message and where in message and "delete it" in message
    assert "\n" not in message


def test_a_server_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path, first = tmp_path / "costs.json", KeptCosts(of=OF, loads=[])
    kept_costs.write(path, first)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        kept_costs.write(path, kept(served(Machine()).costs, OF))
    assert kept_costs.read(path) == first


def test_a_plan_is_made_of_what_a_server_has_kept(tmp_path: Path):
    machine, path = Machine(), tmp_path / "costs.json"
    kept_costs.write(path, kept(served(machine).costs, OF))
    arguments = ["--costs", str(path), "--acceptance", "0.8,0.7,0.6", "--json"]
    result = CliRunner().invoke(app, ["plan-speculation", *arguments])
    assert result.exit_code == 0, result.stderr
    batches = json.loads(result.stdout)["batches"]
    assert list(batches) == ["1", "16", "128"]
    for batch, row in batches.items():
        # Either context was served as long.
        plain = machine.value(int(batch), 64.0, 0), machine.value(int(batch), 8000.0, 0)
        for k, speedup in enumerate(row["speedups"]):
            true = [
                machine.value(int(batch), context, k) / of_plain
                for context, of_plain in zip((64.0, 8000.0), plain, strict=True)
            ]
            assert any(speedup == pytest.approx(ratio, rel=0.03) for ratio in true), (batch, k)
    none = tmp_path / "none.json"
    kept_costs.write(none, KeptCosts(of=OF, loads=[]))
    result = CliRunner().invoke(app, ["plan-speculation", "--costs", str(none)])
    assert result.exit_code == 2 and "names no batch size" in result.stderr
