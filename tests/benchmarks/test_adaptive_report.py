"""The figures and the plot of `python -m benchmarks.adaptive`, of rates that are given."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.adaptive import Point, draw


def point(batch: int, plain: float, fixed: float, adaptive: float) -> dict:
    rates = {"plain": (plain, 10.0), "K = 0": (plain, 10.0), "K = 1": (fixed, 9.0)}
    rates["adaptive"] = (adaptive, 11.0)
    return Point(64, batch, [rates] * 3, [1.0, 1.5]).to_json()


def test_the_server_that_chooses_is_compared_with_the_fastest_other_one():
    small, large = point(1, 10.0, 20.0, 19.0), point(32, 100.0, 50.0, 99.0)
    assert (small["best"], large["best"]) == ("K = 1", "plain")
    assert small["over_best"]["median"] == pytest.approx(0.95)
    assert large["over_best"]["median"] == large["over_plain"]["median"] == pytest.approx(0.99)
    assert small["with_prompts_over_plain"]["median"] == pytest.approx(1.1)
    assert small["speedups"] == [1.0, 2.0]
    assert small["prediction_error"] == pytest.approx(0.25)


def test_the_fastest_other_one_is_chosen_by_other_rounds_than_it_is_compared_in():
    """Servers that are alike, each lucky in rounds of its own: by the same rounds it would lose."""
    lucky = {"plain": 0, "K = 0": 1, "adaptive": 2}
    rounds = [
        {name: (12.0 if i % 3 == turn else 10.0,) * 2 for name, turn in lucky.items()}
        for i in range(9)
    ]
    same_rounds = [one["adaptive"][0] / max(one["plain"][0], one["K = 0"][0]) for one in rounds]
    assert sum(same_rounds) / 9 < 0.96
    assert Point(64, 1, rounds, None).over_best()["median"] == pytest.approx(1.0)


def test_the_plot_has_a_line_for_each_server_and_a_dot_for_each_choice():
    points = [point(1, 10.0, 20.0, 19.0), point(32, 100.0, 50.0, 99.0)]
    root = ElementTree.fromstring(draw({"points": points, "model": "m", "machine": "here"}))
    assert len(root.findall("{*}polyline")) == 4
    assert len(root.findall("{*}circle")) == 2
