"""Every command of README.md, CONTRIBUTING.md and docs/ is declared in documented_commands.toml,
and runs here in its short form, is run by a test that the table names, or needs another machine."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from begun import SERVERS, TEMPLATE, server_template, template
from documented_commands import (
    DOCUMENTS,
    ROOT,
    Row,
    commands_of,
    documented_commands,
    read_table,
    undeclared,
    undocumented,
    unmarked_blocks,
)

from benchmarks.server import ServerProcess
from sglang_ascend.models.catalog import model_path

TIMEOUT_S = 500
BEGUN_COMMANDS = Path(__file__).parent / "begun_commands"  # its sitecustomize.py
TABLE = read_table()
HOW = ("run", "serve", "shown_by", "not_here")
# A `make test ARGS=...` hands its variables to every make below it.
INHERITED = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "MODEL", "PORT", "VENV")
# The environment of this Python is in place: make has nothing to install.
MAKE = f'make() {{ command make -o venv -o venv-dev VENV="{sys.prefix}" "$@"; }}\n'
# Half of what a module does in its short form is to import packages: it is a copy of a process that
# has. What make runs is not.
BEGUN = f"""
python() {{
    if [ "$1" = -m ]; then command python -S -E "{BEGUN_COMMANDS}/run_module.py" "${{@:2}}"
    else command python "$@"; fi
}}
sglang-ascend() {{ python -m sglang_ascend "$@"; }}
"""
QUESTION = "curl -s http://127.0.0.1:30000/v1/chat/completions "


def environment(scratch: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in INHERITED}
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    folder = str(model_path("nano-deepseek"))
    return kept | {"PATH": path, "SCRATCH": str(scratch), "FOLDER": folder}


def with_begun_servers(environ: dict[str, str]) -> dict[str, str]:
    """Servers that commands start are copies of that process, too."""
    paths = (str(BEGUN_COMMANDS), environ.get("PYTHONPATH"))
    return environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        TEMPLATE: template().address(),
        SERVERS: server_template().address(),
    }


def run(line: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", MAKE + BEGUN + line],
        cwd=ROOT,
        env=with_begun_servers(environment(scratch)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def rows_with(how: str) -> list[Any]:
    rows = [row for row in TABLE if getattr(row, how)]
    return [pytest.param(getattr(row, how), id=row.command) for row in rows]


def test_every_documented_command_is_declared_and_every_declared_one_documented():
    documented = documented_commands()
    assert undeclared(documented, TABLE) == []
    assert undocumented(documented, TABLE) == []
    assert len({row.command for row in TABLE}) == len(TABLE)
    assert [row for row in TABLE if sum(bool(getattr(row, how)) for how in HOW) != 1] == []


def test_no_code_block_hides_what_it_holds():
    texts = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    found = {name: unmarked_blocks(text) for name, text in texts.items()}
    assert found == {name: [] for name in texts}
    assert unmarked_blocks("```\nmake serve\n```\n\n    make test\n") == ["make serve", "make test"]


def test_a_command_is_read_from_blocks_and_inline_and_from_several_lines():
    text = """`make one` and `sglang-ascend two --x`, not `make` nor `scripts/x.sh`.

```sh
export A=1 B="2 3"
python -m three \\
    --long          # why
BODY='{"a": 1,
       "b": 2}'
curl four -d "x
y"
```
"""
    assert list(commands_of(text)) == [
        "make one",
        "sglang-ascend two --x",
        "python -m three --long",
        'curl four -d "x y"',
    ]


def test_an_undeclared_command_and_a_row_without_a_document_are_found():
    documented = set(commands_of("`make known` and `make unknown`"))
    table = [Row("make known", run="true"), Row("make gone", run="true")]
    assert undeclared(documented, table) == ["make unknown"]
    assert undocumented(documented, table) == ["make gone"]


def missing_tests(table: list[Row]) -> list[str]:
    def names(path: Path) -> set[str]:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        return {node.name for node in body if isinstance(node, ast.FunctionDef)}

    nodes = [row.shown_by.partition("::") for row in table if row.shown_by]
    return [
        f"{path}::{name}"
        for path, _, name in nodes
        if not (ROOT / path).is_file() or name not in names(ROOT / path)
    ]


def test_every_test_that_the_table_names_exists():
    assert missing_tests(TABLE) == []
    assert missing_tests([Row("make x", shown_by=f"tests/{Path(__file__).name}::test_gone")])


def keys_of(report: Any) -> set[str]:
    """Of every object in it; a batch_8 is a batch_N."""
    if isinstance(report, list):
        return set().union(*map(keys_of, report))
    if not isinstance(report, dict):
        return set()
    own = {re.sub(r"_\d+$", "_N", name) for name in report}
    return own.union(*map(keys_of, report.values()))


def documented_keys(module: str, line: str = "") -> set[str]:
    """The names in backquotes behind "JSON:" in the docstring of a benchmark's ``main``, or behind
    "JSON with --FLAG:" where the line has that flag."""
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    (main,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "main"]
    sections = re.split(r"JSON(?: with (--\w+))?:", ast.get_docstring(main) or "")
    flags = dict(zip(sections[1::2], sections[2::2], strict=True))
    said = next((flags[flag] for flag in flags if flag and flag in line), flags.get(None, ""))
    return set(re.findall(r"`(\w+)`", said))


@pytest.mark.sglang
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("line", rows_with("run"))
def test_the_short_form_of_a_documented_command_runs(line: str, tmp_path: Path):
    done = run(line, tmp_path)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    if "--json" in line:
        module = (re.findall(r"benchmarks\.\w+", line) or ["benchmarks.serving"])[0]
        promised = documented_keys(module, line)
        assert len(promised) > 3
        assert promised - keys_of(json.loads(done.stdout)) == set()


def test_a_document_with_a_dead_command_fails(tmp_path: Path):
    (line,) = commands_of("It is measured by `python -m benchmarks.top_k_top_p --gone --json`.")
    with pytest.raises(AssertionError, match="No such option"):
        test_the_short_form_of_a_documented_command_runs(line, tmp_path)


@pytest.fixture
def server(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.chdir(ROOT)
    program = ("bash", "-euo", "pipefail", "-c", MAKE + line, "bash")
    for name in INHERITED:
        monkeypatch.delenv(name, raising=False)
    started = ServerProcess([], tmp_path / "server.log", program, environment(tmp_path))
    try:
        started.wait_until_ready(TIMEOUT_S)
        yield started
    finally:
        started.stop()


@pytest.mark.sglang
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("line", rows_with("serve"))
def test_a_documented_server_answers_the_documented_question(server: ServerProcess, tmp_path: Path):
    (question,) = [command for command in documented_commands() if command.startswith(QUESTION)]
    done = run(question.replace("http://127.0.0.1:30000", server.url), tmp_path)
    assert done.returncode == 0, server.log_tail()
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
