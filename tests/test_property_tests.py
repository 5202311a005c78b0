"""Property tests share one Hypothesis profile: no deadline, and in CI the same examples every time.

A deadline fails a right result on a busy machine; a random example fails another person's change.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
OF_THE_PROFILE = {"deadline", "derandomize", "database"}


def own_settings(source: str) -> Iterator[str]:
    """What a file sets of the profile's, as "settings(deadline=...)"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "settings":
            names = {keyword.arg for keyword in node.keywords}
            yield from (f"settings({name}=...)" for name in sorted(names & OF_THE_PROFILE))


def test_no_test_overrides_the_profile() -> None:
    found = {path.name: list(own_settings(path.read_text())) for path in TESTS.rglob("*.py")}
    assert {name: own for name, own in found.items() if own} == {}


@pytest.mark.parametrize("settings_call", ["settings", "hypothesis.settings"])
def test_a_file_that_overrides_it_is_found(settings_call: str) -> None:
    source = f"@{settings_call}(max_examples=3, deadline=100)\ndef test(): ..."
    assert list(own_settings(source)) == ["settings(deadline=...)"]


def test_the_profile_that_runs_now_has_no_deadline() -> None:
    assert settings().deadline is None


@pytest.mark.parametrize(
    ("ci", "conftest", "expected"),
    [
        ("", "import conftest", "None False"),
        ("true", "import conftest", "None True"),
        ("", "pass", "0:00:00.200000 False"),  # the control: Hypothesis without our profile
    ],
)
def test_examples_are_random_on_a_desk_and_fixed_in_ci(ci, conftest, expected) -> None:
    program = f"""
{conftest}
from hypothesis import settings
print(settings().deadline, settings().derandomize)
"""
    environ = {name: value for name, value in os.environ.items() if name != "CI"}
    environ |= {"PYTHONPATH": str(TESTS)} | ({"CI": ci} if ci else {})
    found = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == expected


def test_our_own_ci_fixes_the_examples() -> None:
    """Its make test has no CI variable: torch reads it too, and would not be what a user runs."""
    (command,) = [
        line
        for line in (TESTS.parent / ".ci" / "run").read_text().splitlines()
        if line.strip().startswith("make test ")
    ]
    assert "--hypothesis-profile=ci" in command
