"""Figures of rounds against medians and ratios by hand; reports that cannot be compared say why."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from sglang_ascend.bench import run
from sglang_ascend.bench.client import Client, ServerError
from sglang_ascend.bench.command import print_report
from sglang_ascend.bench.figures.machine import describe_machine
from sglang_ascend.bench.figures.plot import draw
from sglang_ascend.bench.figures.report import summarise
from sglang_ascend.bench.rounds import Round, Sample, alternate, read_tasks
from sglang_ascend.cli import app

MODEL = ("--model", str(Path(__file__).parent), "--server-args")
RATES = [(10.0, 15.0), (20.0, 50.0), (40.0, 40.0)]  # without and with MTP, of the task "qa"


def sample(rate: float, histogram: list[int] | None = None, loops: bool = False) -> Sample:
    return Sample(rate, 1.0, int(rate), histogram, [3, 1, 0, 0], loops)


def one_round(task: str, first: int, samples: dict[str, Sample]) -> Round:
    return Round(task, first, f"prompts {first} of {task}", samples)


def rounds(scale: float = 1.0) -> list[Round]:
    found = [
        one_round("qa", n, {"plain": sample(plain), "mtp": sample(scale * mtp, [2, 1, 1])})
        for n, (plain, mtp) in enumerate(RATES)
    ]
    both = {"plain": sample(5.0), "mtp": sample(scale * 50.0, [0, 0, 9], loops=True)}
    return [*found, one_round("code", 0, {"plain": sample(10.0), "mtp": sample(scale * 20.0, [4])}),
            one_round("code", 1, both), one_round("chinese", 0, both)]  # fmt: skip


def written(path: Path, found: list[Round], temperature: float = 0.0) -> Path:
    servers = {name: {"url": "http://x"} for name in found[0].samples}
    report = {"machine": "a machine", "code": "c", "model": "m", "max_new_tokens": 8, "batch": 1}
    report["temperature"] = temperature
    figures = summarise(found, "plain", "mtp")
    report |= {"servers": servers, "baseline": "plain", "main": "mtp", **figures}
    path.write_text(json.dumps(report | {"rounds": [asdict(one) for one in found]}))
    return path


def test_figures_are_medians_of_rounds_that_do_not_loop():
    report = summarise(rounds(), "plain", "mtp")
    qa, code, chinese = (report["tasks"][name] for name in ("qa", "code", "chinese"))
    assert (qa["rounds"], qa["plain_tok_s"], qa["mtp_tok_s"]) == (3, 20, 40)
    assert qa["speedup"] == statistics.median(mtp / plain for plain, mtp in RATES) == 1.5
    assert (qa["speedup_low"], qa["speedup_high"]) == (1, 2.5)
    assert qa["accept_length"] == 1 + 3 / 4
    assert qa["lookup_accept_length"] == 1 + 1 / 4
    assert (code["rounds"], code["speedup"], code["looping"]["speedup"]) == (1, 2, 10)
    assert (chinese["rounds"], chinese["speedup"], chinese["looping"]["rounds"]) == (0, None, 1)
    mean = report["mean"]
    assert (mean["tasks"], mean["speedup"]) == (2, (1.5 + 2) / 2)
    assert mean["plain_tok_s"] == (20 + 10) / 2
    assert mean["speedup_low"] == pytest.approx((1 + 2) / 2)
    assert report["acceptance"]["mtp"]["histogram"] == [10, 3, 3]


def test_one_round_has_no_spread():
    """Six prompts at once are one round, whatever the task: an interval would be a point."""
    report = summarise([rounds()[0], rounds()[3]], "plain", "mtp")
    for row in (*report["tasks"].values(), report["mean"]):
        assert row["speedup"] is not None
        assert row["speedup_low"] is row["speedup_high"] is None


def test_lengths_by_number_of_drafts_say_what_was_measured():
    found = [
        replace(one, samples={**one.samples, "mtp_1": sample(30.0, [1, 3])}) for one in rounds()
    ]
    by_steps = summarise(found, "plain", "mtp")["num_steps"]
    assert {key: row["measured"] for key, row in by_steps.items()} == {"1": True, "2": True}
    assert by_steps["1"]["accept_length"] == 1 + 3 / 4
    estimated = summarise(rounds(), "plain", "mtp")["num_steps"]["1"]
    assert estimated["measured"] is False and estimated["tok_s"] is None
    assert estimated["accept_length"] == 1 + 6 / 16


def test_servers_take_turns_in_alternating_order():
    asked: list[tuple[str, str]] = []
    results = list(
        alternate({"a": "a", "b": "b"}, lambda name, group: asked.append((name, group[0])), "xyz")
    )
    assert asked == [tuple(pair) for pair in "ax bx ax bx by ay az bz".split()]
    assert len(results) == 3


def bench(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *words])
    return result.exit_code, result.stdout, result.stderr


def test_two_reports_are_compared_prompt_by_prompt(tmp_path):
    before = written(tmp_path / "before.json", rounds())
    after = written(tmp_path / "after.json", rounds(scale=1.25)[::-1], temperature=0.7)
    out = tmp_path / "compared"
    code, stdout, said = bench("--compare", str(before), str(after), "--out", str(out), "--json")
    assert code == 0, said
    report = json.loads(stdout)
    assert report == json.loads((tmp_path / "compared.json").read_text())
    assert report["temperature"] == "0.0 | 0.7"
    for row in (*report["tasks"].values(), report["mean"]):
        assert row["speedup"] in (None, pytest.approx(1.25))
    assert report["tasks"]["qa"]["speedup_low"] == pytest.approx(1.25)
    ElementTree.fromstring((tmp_path / "compared.svg").read_text())
    assert "1.25" in bench("--compare", str(before), str(after), "--out", str(out))[1]


@pytest.mark.parametrize("task", ["[zh]", "x[b]y", "[/zh]"])
def test_a_task_is_printed_by_its_name(task, tmp_path):
    """Whatever rich would make of it."""
    found = [replace(one, task=task) for one in rounds()]
    report = str(written(tmp_path / "report.json", found))
    code, stdout, said = bench("--compare", report, report, "--out", str(tmp_path / "x"))
    assert code == 0, said
    assert task in stdout


def test_no_figure_is_cut_to_the_width_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    report = summarise(rounds(), "plain", "mtp")
    servers = ["plain", "mtp", "mtp_1", "mtp_2"]
    for place, row in enumerate((*report["tasks"].values(), report["mean"])):
        row |= {f"{name}_tok_s": 1234.56 + place for name in servers}
    print_report(report | {"servers": dict.fromkeys(servers), "model": "m", "machine": "a machine",
                           "baseline": "plain", "main": "mtp"})  # fmt: skip
    printed = capsys.readouterr().out
    assert "mtp_2 tok/s" in printed and "tokens/forward" in printed and "1.00 - 2.50" in printed
    assert printed.count("1234.56") == len(servers) and "…" not in printed
    assert "K drafts: 1: 1.38 (estimate), 2: 1.56\n" in printed


def test_a_comparison_overwrites_neither_report(tmp_path, monkeypatch):
    """`bench` is where a report is written unless --out says otherwise: the one before may be."""
    monkeypatch.chdir(tmp_path)
    before, after = written(tmp_path / "bench.json", rounds()), written(Path("b.json"), rounds())
    content = before.read_bytes()
    for pair in (("bench.json", "b.json"), (str(after), str(before))):
        code, _, said = bench("--compare", *pair)
        assert code == 2 and "bench.json would be overwritten" in said and said.count("\n") == 1
    assert before.read_bytes() == content and not (tmp_path / "bench.svg").exists()


@pytest.mark.parametrize("words", ["--task qa", "--num-prompts 1", "--batch 2", "--temperature 1"])
def test_options_that_two_reports_do_not_follow_are_refused(words, tmp_path):
    report = str(written(tmp_path / "report.json", rounds()))
    out = tmp_path / "compared"
    code, _, said = bench("--compare", report, report, "--out", str(out), *words.split())
    assert code == 2 and "two reports have their replies: leave out" in said
    assert said.count("\n") == 1 and not (tmp_path / "compared.json").exists()


def test_a_report_that_is_not_there_is_the_one_that_is_named(tmp_path):
    before = str(written(tmp_path / "before.json", rounds()))
    for pair in ((before, "gone.json"), ("gone.json", before)):
        code, _, said = bench("--compare", *pair, "--out", str(tmp_path / "x"))
        assert code == 2 and "gone.json is no file: --compare takes two reports" in said


def test_a_server_that_fails_does_not_take_the_rounds_before_it_along(tmp_path, monkeypatch):
    left = rounds()[:2]

    def failing(*_):
        yield from left
        raise ServerError("http://x answered HTTP 400: the prompt is too long.")

    monkeypatch.setattr(Client, "info", lambda self: {"model_path": "m"})
    monkeypatch.setattr(run, "run_tasks", failing)
    asked = ("--url", "http://x", "--plain-url", "http://y", "--out", str(tmp_path / "x"))
    code, _, said = bench(*asked)
    assert code == 2
    assert f"the prompt is too long; {tmp_path}/x.json has the 2 rounds before it." in said
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["ended_early"].startswith("http://x answered HTTP 400")
    assert report["rounds"] == [asdict(one) for one in left]
    left.clear()
    (tmp_path / "x.json").unlink()
    assert bench(*asked)[0] == 2 and not (tmp_path / "x.json").exists()


def test_a_plain_server_that_speculates_is_refused(tmp_path, monkeypatch):
    info = {"model_path": "m", "speculative_algorithm": "MTP"}
    monkeypatch.setattr(Client, "info", lambda self: info)
    out = ("--out", str(tmp_path / "x"))
    code, _, said = bench("--url", "http://x", "--plain-url", "http://y", *out)
    assert code == 2 and "http://y drafts by MTP" in said and said.count("\n") == 1


def test_a_client_that_is_no_linux_has_a_name(monkeypatch):
    """macOS has neither; the report was made behind all rounds."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    assert describe_machine().split(", ")[1] == f"{os.cpu_count()} cores"


def test_rounds_of_other_prompts_are_not_compared(tmp_path):
    found = rounds()
    changed = [replace(one, prompts="others") if one.task == "qa" else one for one in found]
    reports = (written(tmp_path / "a.json", found), written(tmp_path / "b.json", changed))
    out = str(tmp_path / "compared")
    code, stdout, said = bench("--compare", *map(str, reports), "--out", out, "--json")
    assert code == 0, said
    assert "qa" not in json.loads(stdout)["tasks"]


def test_a_prompt_that_stands_twice_is_two_rounds(tmp_path):
    """A report is as fast as itself."""
    found = [replace(one, prompts="the same") for one in rounds()]
    report = str(written(tmp_path / "report.json", found))
    out = str(tmp_path / "compared")
    code, stdout, said = bench("--compare", report, report, "--out", out, "--json")
    assert code == 0, said
    for row in json.loads(stdout)["rounds"]:
        assert row["samples"]["a"] == row["samples"]["b"]


def test_a_bar_is_as_tall_as_its_rate(tmp_path):
    report = json.loads(written(tmp_path / "report.json", rounds()).read_text())
    root = ElementTree.fromstring(draw(report))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    plain, mtp = (float(box.attrib["height"]) for box in boxes[1:3])
    assert mtp == pytest.approx(2 * plain, abs=1)


def test_bars_of_many_tasks_are_seen(tmp_path):
    """A file of prompts may give each a domain of its own."""
    found = [replace(rounds()[0], task=f"task {n}") for n in range(300)]
    report = json.loads(written(tmp_path / "report.json", found).read_text())
    root = ElementTree.fromstring(draw(report))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert min(float(box.attrib["width"]) for box in boxes) >= 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_new_tokens": 9}, "the reports differ in max_new_tokens: 8 and 9."),
        ({"rounds": []}, "the reports have no round of the same task and prompts."),
        ({"rounds": [{}]}, "these are not two reports"),
    ],
)
def test_reports_that_cannot_be_compared_are_refused(change: dict[str, Any], sentence, tmp_path):
    before = written(tmp_path / "before.json", rounds())
    after = tmp_path / "after.json"
    after.write_text(json.dumps(json.loads(before.read_text()) | change))
    code, _, said = bench("--compare", str(before), str(after), "--out", str(tmp_path / "x"))
    assert code == 2 and sentence in said and said.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name either a running server with --url, or a checkpoint with --model."),
        (["--url", "http://127.0.0.1:1", "--task", "poems"], "'poems' is not a task: choose of"),
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--url", "http://x", "--model", "smollm2-mtp"], "name either a running server"),
        (["--url", "http://x", "--num-steps", "2"], "--num-steps needs --model."),
        (["--model", "smollm2-mtp", "--plain-url", "http://x"], "--plain-url needs --url."),
        (["--out", "/gone/bench"], "/gone is no folder"),
        (["--out", "/proc/bench"], "--out /proc/bench.json cannot be written"),
        (["--out", "."], "--out . is a folder: name the files in it"),
        (["--prompts", __file__], f"{__file__} must be a JSON list of"),
        (["--compare", __file__, __file__], f"{__file__} is no report of sglang-ascend bench"),
        (["--model", "gpt-5"], "'gpt-5' is not a model of this package and no folder"),
        ([*MODEL, "--dtype 'float32"], "--server-args --dtype 'float32 cannot be read: No closing"),
        ([*MODEL, "--speculative-algorithm EAGLE"], "leave --speculative-algorithm out of"),
        (["--compare", "a", "b", "--url", "http://x"], "--compare names all that is measured"),
        (["--compare", "a", "b", "--num-steps", "2"], "--compare names all that is measured"),
        (["--compare", "gone.json", "also.json"], "'gone.json' is no address of a server"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words, sentence, tmp_path):
    code, _, said = bench("--out", str(tmp_path / "x"), *words)
    assert code == 2 and sentence in said and said.count("\n") == 1


def test_the_package_has_seven_tasks_of_six_prompts(tmp_path):
    tasks = read_tasks()
    assert list(tasks) == ["chat", "code", "maths", "copy", "qa", "summary", "chinese"]
    assert {len(prompts) for prompts in tasks.values()} == {6}
    other = tmp_path / "prompts.json"
    for row in ({"prompt": "x"}, {"domain": "a", "prompt": 5}, {"domain": "a", "prompt": " "}):
        other.write_text(json.dumps([{"domain": "a", "prompt": "x"}, row]))
        with pytest.raises(ValueError, match=r"must be a JSON list of"):
            read_tasks(other)
