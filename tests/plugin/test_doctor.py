"""The doctor tells the truth: silent when all is well, one sentence and exit code 1 when not.

It must also work where SGLang or torch is absent, which is when people run it.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from begun import template
from rich.console import Console

from sglang_ascend.models import catalog
from sglang_ascend.plugin.doctor import command as doctor
from sglang_ascend.plugin.doctor.report import Report, Section

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
PINS = [REQUIREMENTS / name for name in ("npu-torch-2.10.txt", "npu.txt")]

# Runs the doctor where `import sglang` (or torch) fails and importlib finds no such distribution.
WITHOUT = """
import importlib.metadata, importlib.util, json, sys
absent = sys.argv[1:]
real_version, real_find = importlib.metadata.version, importlib.util.find_spec
def version(name):
    if name in absent:
        raise importlib.metadata.PackageNotFoundError(name)
    return real_version(name)
importlib.metadata.version = version
importlib.util.find_spec = lambda name, *rest: None if name in absent else real_find(name, *rest)
for name in absent:
    sys.modules[name] = None
from sglang_ascend.cli import app
sys.argv = ["sglang-ascend", "doctor", "--json"]
app()
"""


def run_without(*absent: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *absent], capture_output=True, text=True, timeout=500
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.sglang
def test_an_installation_as_pinned_has_no_problem_and_every_part_is_listed():
    command = ["sglang_ascend", "doctor", "--strict", "--json"]
    done = template().run(command, os.environ, timeout=500)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["problems"]) == (0, True, [])
    sections = found["sections"]
    versions = {row["package"]: row["version"] for row in sections["Versions"]}
    assert versions["sglang"] == "0.5.23"
    ours = [row for row in sections["Entry points"] if row["distribution"] == "sglang-ascend"]
    assert sorted(row["group"] for row in ours) == sorted(doctor.GROUPS)
    assert {row["state"] for row in sections["Hooks"]} == {"in place"}
    assert all(row["why"] and row["delete when"] and row["patch"] for row in sections["Hooks"])
    assert {row["what"] for row in sections["Platform"]} == {"platform", "why", "device"}
    operators = {row["operator"] for row in sections["Operators"]}
    assert {"attention.paged_gqa", "chain.verify_chain"} <= operators
    assert all(row["implementation"] != "none" for row in sections["Operators"])
    products = {row["body"]: row for row in sections["Integer products on CPU"]}
    assert (products["numba"]["compared with int64"], products["numba"]["chosen"]) == (
        "exact",
        "yes",
    )
    served = {row["flag"]: row["served by"] for row in sections["Registered"]}
    assert served["--speculative-algorithm MTP"].startswith("sglang_ascend.plugin.")
    assert {row["model"] for row in sections["Models"]} == set(catalog.MODELS)


def test_without_sglang_it_says_so_and_checks_the_rest():
    code, found = run_without("sglang")
    assert code == 1
    assert len(found["problems"]) == 1
    assert "found none: install sglang==0.5.23" in found["problems"][0]
    assert found["sections"]["Operators"] and "Hooks" not in found["sections"]


def test_without_torch_it_still_answers():
    code, found = run_without("sglang", "torch")
    assert code == 1
    assert "Operators" not in found["sections"] and found["sections"]["Models"]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SGLANG_PLATFORM": "cuda"}, "SGLANG_PLATFORM=cuda makes SGLang skip this package"),
        ({"SGLANG_PLUGINS": "other, third"}, "leaves sglang_ascend out"),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, "SGLANG_USE_CPU_ENGINE asks for"),
        ({"SGLANG_ASCEND_CASHE": "/x"}, "did you mean SGLANG_ASCEND_CACHE?"),
        ({"SGLANG_ASCEND_CACHE": " "}, "SGLANG_ASCEND_CACHE=' ' is not usable"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_variable_that_leaves_us_out_or_means_nothing_is_one_problem(environ, said):
    section = doctor.check_environment(environ)
    assert len(section.problems) == 1
    assert said in section.problems[0]
    assert section.rows == tuple(environ.items())


def test_a_cache_that_is_none_is_a_problem_of_the_models_too(monkeypatch):
    monkeypatch.setenv("SGLANG_ASCEND_CACHE", "")
    section = doctor.check_models()
    assert section.rows == () and "SGLANG_ASCEND_CACHE='' is not usable" in section.problems[0]


@pytest.mark.parametrize(
    "environ", [{}, {"SGLANG_PLUGINS": "other,sglang_ascend"}, {"HOME": "/", "SGLANG_X": "1"}]
)
def test_other_variables_are_no_problem(environ):
    assert doctor.check_environment(environ).problems == ()


def test_insisting_on_the_cpu_platform_beside_an_accelerator_is_a_problem(monkeypatch):
    environ = {"SGLANG_PLATFORM": "sglang_ascend"}
    monkeypatch.setattr(doctor, "_activate", lambda: "sglang_ascend.plugin.cpu.platform.X")
    assert doctor.check_environment(environ).problems == ()
    monkeypatch.setattr(doctor, "_activate", lambda: None)
    assert "SGLang will not start" in doctor.check_environment(environ).problems[0]


@pytest.mark.parametrize("times", [0, 1, 2])
def test_each_entry_point_must_be_there_exactly_once(monkeypatch, times):
    def points(group):
        ours = SimpleNamespace(name="sglang-ascend")
        point = EntryPoint(doctor.ENTRY_POINT, "sglang_ascend.plugin.entry:register", group)
        vars(point)["dist"] = ours
        other = EntryPoint("other", "other:register", group)
        vars(other)["dist"] = SimpleNamespace(name="other")
        return [point] * times + [other]

    monkeypatch.setattr(doctor, "entry_points", points)
    section = doctor.check_entry_points()
    assert len(section.rows) == 2 * (times + 1)
    assert len(section.problems) == (0 if times == 1 else 2)
    assert all(f"registered {times} times" in problem for problem in section.problems)


def test_an_operator_with_two_implementations_for_the_device_is_a_problem(monkeypatch):
    from sglang_ascend.ops import dispatch

    monkeypatch.setattr(dispatch, "OPS", dict(dispatch.OPS))
    op = dispatch.Op("test.twice", reference=len)
    for name in ("one", "other"):
        op.register(dispatch.Implementation(name, len))
    section = doctor.check_operators()
    assert len(section.problems) == 1
    assert "test.twice" in section.problems[0]
    assert "ambiguous between one, other" in section.problems[0]


@pytest.mark.sglang
def test_strict_says_that_without_torch_npu_nothing_was_compared():
    section = doctor.check_constraints()
    assert section.rows == (("all", "none compared", "torch_npu is not installed"),)
    assert section.problems == ()


def test_strict_compares_each_operator_with_the_documentation(monkeypatch):
    from sglang_ascend.ops import npu

    monkeypatch.setattr(npu, "documentation", lambda: [""])
    section = doctor.check_constraints()
    assert [row[0] for row in section.rows] == list(npu.CONSTRAINTS)
    # torch has no such operators here, which each is a problem with its remedy.
    assert len(section.problems) == len(npu.CONSTRAINTS)
    # Of either torch: the pin of requirements/npu.txt alone would replace that of SGLang's image.
    pins = [re.findall(r"^torch_npu==(\S+)", path.read_text(), re.M)[0] for path in PINS]
    remedy = f"torch_npu {', '.join(pins)} are described here; install the one for your torch."
    assert all(problem.endswith(remedy) for problem in section.problems)


def test_a_hook_that_is_not_in_place_is_a_problem(loaded_plugins, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_ascend.plugin.hooks.registration import hooks_of_this_device

    assert doctor.check_hooks().problems == ()
    lost = hooks_of_this_device()[0].target
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {lost})
    section = doctor.check_hooks()
    assert [row[0] for row in section.rows if row[2] == "MISSING"] == [lost]
    assert len(section.problems) == 1 and lost in section.problems[0]


@pytest.mark.sglang
def test_an_algorithm_that_is_not_registered_is_a_problem(loaded_plugins, monkeypatch):
    from sglang.srt.speculative import spec_registry

    assert doctor.check_registered().problems == ()
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    assert "--speculative-algorithm MTP" in doctor.check_registered().problems[0]


@pytest.mark.sglang
def test_sglangs_own_backend_in_place_of_ours_is_a_problem(loaded_plugins, monkeypatch):
    from sglang.srt.layers.attention import attention_registry

    backends = {"ascend": attention_registry.create_ascend_backend}
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", backends)
    assert "--attention-backend ascend is not ours" in doctor.check_registered().problems[0]


@pytest.mark.sglang
def test_another_platform_in_place_of_ours_is_a_problem(loaded_plugins, monkeypatch):
    from sglang.srt import platforms
    from sglang.srt.platforms.interface import SRTPlatform

    assert doctor.check_platform().problems == ()
    monkeypatch.setattr(platforms, "current_platform", SRTPlatform(), raising=False)
    assert "instead of sglang_ascend.plugin.cpu.platform" in doctor.check_platform().problems[0]


REPORT = Report(
    (
        Section("First", ("name", "value"), (("a" * 90, "b" * 90), ("[red]c", "d"))),
        Section("Second", ("name",), (), ("Something is off: do this.",)),
    )
)


def test_a_log_gets_one_line_per_row_and_markup_is_not_read():
    out = io.StringIO()
    REPORT.print(Console(file=out, width=40))
    assert out.getvalue().splitlines() == [
        "First:",
        f"  {'a' * 90} | {'b' * 90}",
        "  [red]c | d",
        "Second:",
        "  none",
        "PROBLEM: Something is off: do this.",
    ]


def test_a_terminal_gets_tables():
    out = io.StringIO()
    REPORT.print(Console(file=out, width=200, force_terminal=True))
    assert "─" in out.getvalue() and "[red]c" in out.getvalue()


def test_json_holds_the_same():
    found = json.loads(REPORT.to_json())
    assert found["problems"] == ["Something is off: do this."] and not found["ok"]
    assert found["sections"]["First"][1] == {"name": "[red]c", "value": "d"}
