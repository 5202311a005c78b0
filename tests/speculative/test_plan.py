"""`sglang-ascend plan-speculation`: the formula by hand, its inputs, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_ascend.cli import app

# T(B,1..3) of a machine whose weights take 10 ms and whose rows take 1 ms.
COSTS = {
    "acceptance": [0.5, 0.5],
    "batches": {
        "2": {"target_ms": [10, 10, 10], "draft_ms": 1, "overhead_ms": 0.5},
        "20": {"target_ms": [20, 40, 60], "draft_ms": 1, "overhead_ms": 0.5},
    },
}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan-speculation", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return path


def test_the_table_is_the_formula(costs: Path) -> None:
    code, out, _ = run("--costs", str(costs), "--max-drafts", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["expected_tokens"] == [1, 1.5, 1.75]
    small, large = found["batches"]["2"], found["batches"]["20"]
    assert small["speedups"] == pytest.approx([1, 15 / 11.5, 17.5 / 12.5])
    assert large["speedups"] == pytest.approx([1, 30 / 41.5, 35 / 62.5])
    assert (small["best"], large["best"]) == (2, 0)


def test_flags_and_file_say_the_same(costs: Path) -> None:
    flags = ("--acceptance", "0.5,0.5", "--target-ms", "10", "--target-row-ms", "1")
    flags += ("--draft-ms", "1", "--overhead-ms", "0.5", "--batch", "2", "--batch", "20")
    of_flags = run(*flags, "--max-drafts", "2", "--json")
    assert of_flags == run("--costs", str(costs), "--max-drafts", "2", "--json")


def test_no_figure_is_cut_to_the_width_of_a_terminal() -> None:
    code, out, _ = run("--acceptance", "0.5", "--target-ms", "10", "--max-drafts", "15")
    assert code == 0
    assert all(f"K = {k} " in out for k in range(16)) and "…" not in out


def test_a_table_and_a_plot_are_for_people(costs: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plan.svg"
    code, out, _ = run("--costs", str(costs), "--max-drafts", "2", "--plot", str(plot))
    assert code == 0
    assert "K = 2" in out and "1.40" in out
    lines = ElementTree.parse(plot).getroot().findall("{*}polyline")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--acceptance", "0.5"), "--target-ms"),
        (("--target-ms", "10"), "acceptance"),
        (("--target-ms", "10", "--acceptance", "0.5,1.5"), "between 0 and 1"),
        (("--target-ms", "10", "--acceptance", "much"), "--acceptance much is no list"),
        (("--costs", "COSTS", "--batch", "4"), "leave out --batch"),
        (("--costs", "COSTS", "--target-ms", "20"), "leave out the flags in ms"),
        (("--costs", "COSTS", "--draft-ms", "1.5"), "leave out the flags in ms"),
        (("--target-ms", "0", "--acceptance", "0.5"), "no time"),
        (("--target-ms", "nan", "--acceptance", "0.5"), "no time"),
        (("--target-ms", "9", "--draft-ms", "inf", "--acceptance", "0.5"), "no time"),
        (("--target-ms", "9", "--target-row-ms", "-1", "--acceptance", "0.5"), "is no time"),
        (("--target-ms", "9", "--draft-row-ms", "nan", "--acceptance", "0.5"), "no time"),
        (("--costs", "COSTS", "--max-drafts", "3"), "--max-drafts"),
        (("--costs", "NOWHERE"), "NOWHERE"),
        (("--target-ms", "9", "--acceptance", "0.5", "--plot", "NOWHERE/plan.svg"), "NOWHERE"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_sentence(
    arguments: tuple[str, ...], named: str, costs: Path
) -> None:
    given = [str(costs) if word == "COSTS" else word for word in arguments]
    code, out, error = run(*given)
    assert (code, out) == (2, "")
    assert named in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"of": {}, "loads": [{"batch": 1, "context": 9.0}]}, "loads.0.kinds: Field required"),
        ({"loads": []}, "of: Field required"),
        ({"batches": {"1": {"target_ms": [1, float("nan")], "draft_ms": 1}}}, "no time"),
        ({"batches": {"0": {"target_ms": [1, 1], "draft_ms": 1}}}, "batch 0 has no request"),
        ({"batches": []}, "has no costs of steps"),
    ],
)
def test_a_file_of_no_costs_is_refused_in_one_sentence(
    content: dict[str, object], named: str, costs: Path
) -> None:
    costs.write_text(json.dumps(content))
    code, out, error = run("--costs", str(costs), "--acceptance", "0.5", "--max-drafts", "1")
    assert (code, out) == (2, "")
    assert named in error and len(error.strip().splitlines()) == 1
