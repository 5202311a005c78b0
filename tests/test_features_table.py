"""docs/features.md names tests that exist, and calls refused only what the code refuses.

The code's refusals are read from its source: the start's in the plugin, those of requests in the
table of the serving test that sends each one.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_ascend import env

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "features.md"
REFUSE_FLAGS = (
    (
        ROOT / "sglang_ascend/plugin/mtp/refusals.py",
        ("_unsupported_flags", "_unsupported_by_step"),
    ),
    (ROOT / "sglang_ascend/speculative/config.py", ("resolve_config",)),
)
FLAG = re.compile(r"--[a-z0-9-]*[a-z0-9]")
REQUESTS = ROOT / "tests" / "serving" / "test_features.py"


@dataclass(frozen=True)
class Row:
    feature: str
    state: str
    flags: tuple[str, ...]
    test: str


def rows(text: str) -> list[Row]:
    table = text.partition("| feature |")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        Row(feature, state, tuple(re.findall("`([^`]+)`", flags)), test.strip("`"))
        for feature, state, flags, _, test in cells
    ]


def names_of_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def text_of(path: Path, names: tuple[str, ...]) -> str:
    """Source of the functions and annotated constants of these names."""
    source = path.read_text(encoding="utf-8")
    found = []
    for node in ast.parse(source).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        name = target.id if isinstance(target, ast.Name) else getattr(node, "name", None)
        if name in names:
            found.append(ast.get_source_segment(source, node) or "")
    assert len(found) == len(names), names
    return "\n".join(found)


def missing_tests(text: str) -> list[str]:
    return [
        row.test
        for row in rows(text)
        for path, _, name in [row.test.partition("::")]
        if not (ROOT / path).is_file() or name not in names_of_tests(ROOT / path)
    ]


def refusals_without_code(text: str) -> list[str]:
    """Of each refused row, the flags and fields that no refusal names."""
    flags = " ".join(text_of(path, names) for path, names in REFUSE_FLAGS)
    requests = text_of(REQUESTS, ("REFUSED_REQUESTS",))
    return [
        flag
        for row in rows(text)
        if row.state == "refused"
        for flag in row.flags
        if re.search(rf"{re.escape(flag)}\b", flags if flag.startswith("--") else requests) is None
    ]


def test_every_row_has_a_state_and_names_its_test():
    table = rows(TABLE.read_text(encoding="utf-8"))
    assert len(table) > 20
    assert {row.state for row in table} == {"works", "refused"}
    assert len({row.feature for row in table}) == len(table)
    assert all(row.flags for row in table if row.state == "refused")
    assert missing_tests(TABLE.read_text(encoding="utf-8")) == []


def test_every_refusal_of_the_table_is_one_of_the_code():
    assert refusals_without_code(TABLE.read_text(encoding="utf-8")) == []


def test_every_flag_that_the_code_refuses_is_in_the_documentation():
    documented = "".join(path.read_text(encoding="utf-8") for path in TABLE.parent.glob("*.md"))
    refused = {flag for path, names in REFUSE_FLAGS for flag in FLAG.findall(text_of(path, names))}
    assert len(refused) > 20
    assert [flag for flag in sorted(refused) if f"`{flag}" not in documented] == []


def test_the_table_of_variables_is_that_of_the_code():
    table = TABLE.read_text(encoding="utf-8").partition("| variable |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \| `?([^|`]*?)`? ?\|", table, flags=re.MULTILINE)
    by_hand = [variable for variable in env.VARIABLES if variable is not env.SERVES_MTP]
    assert documented == sorted((variable.name, variable.default) for variable in by_hand)


@pytest.mark.parametrize(
    ("row", "wrong_test", "wrong_refusal"),
    [
        ("| a | works | `n` | | `tests/test_features_table.py::test_gone` |", True, False),
        ("| a | works | `n` | | `tests/gone.py::test_gone` |", True, False),
        ("| a | refused | `--chunked-prefill-size` | | `tests/conftest.py::x` |", True, True),
        ("| a | refused | `no_such_field` | | `tests/conftest.py::x` |", True, True),
    ],
)
def test_a_wrong_row_is_found(row, wrong_test, wrong_refusal):
    table = f"| feature | | flag or field | with speculation | shown by |\n{row}\n"
    assert bool(missing_tests(table)) == wrong_test
    assert bool(refusals_without_code(table)) == wrong_refusal
