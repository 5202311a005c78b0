"""`make` on a bare machine: it says what it needs in a sentence, resumes, and never repeats itself.

pip is replaced by a script that records its calls; the real installation is what `.ci/run` shows.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = ["torch", "sglang-dependencies", "no-deps", "package"]

FAKE_PYTHON = """#!/bin/sh
[ "$2 $3" = "pip install" ] || exit 0
echo "$PIP_CONSTRAINT $*" >>"$CALLS"
case "$*" in *"${BREAK:-nothing}"*) echo "ERROR: no such wheel"; exit 1;; esac
echo "Collecting something"
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of what bootstrap.sh reads, with an environment whose pip only records its calls."""
    for name in ("scripts", "requirements", "Makefile", "pyproject.toml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    write_program(tmp_path / ".venv" / "bin" / "python", FAKE_PYTHON)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def bootstrap(tree: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess:
    calls = tree / "calls.txt"
    calls.write_text("")
    return subprocess.run(
        ["bash", "scripts/bootstrap.sh", ".venv", *arguments],
        cwd=tree,
        env=os.environ | {"CALLS": str(calls)} | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def pip_calls(tree: Path) -> list[str]:
    return (tree / "calls.txt").read_text().splitlines()


def test_every_pip_call_runs_under_the_constraints(tree):
    assert bootstrap(tree).returncode == 0
    calls = pip_calls(tree)
    assert len(calls) == len(STEPS)
    constraints = tree / "requirements" / "constraints-cpu.txt"
    assert all(call.startswith(f"{constraints} -m pip install") for call in calls)


def test_a_second_run_installs_nothing(tree):
    bootstrap(tree)
    assert bootstrap(tree).returncode == 0
    assert pip_calls(tree) == []


def test_the_tools_of_the_tests_are_one_more_step(tree):
    bootstrap(tree)
    bootstrap(tree, "dev")
    (call,) = pip_calls(tree)
    assert call.endswith("--editable .[dev]")


def test_a_run_that_failed_says_how_and_resumes_at_the_same_step(tree):
    failed = bootstrap(tree, BREAK="sglang-0.5.23-cpu.txt")
    assert failed.returncode != 0
    assert "ERROR: no such wheel" in failed.stderr
    assert "run the same command again to resume" in failed.stderr
    assert len(pip_calls(tree)) == 2
    assert bootstrap(tree).returncode == 0
    assert len(pip_calls(tree)) == 3


def test_a_changed_requirement_repeats_only_its_step(tree):
    bootstrap(tree)
    with (tree / "requirements" / "no-deps.txt").open("a") as file:
        file.write("wheel\n")
    bootstrap(tree)
    (call,) = pip_calls(tree)
    assert "--no-deps" in call


def machine_with(tmp_path: Path, *programs: str) -> str:
    """A PATH with the shell's usual tools, and nothing else but what is named."""
    folder = tmp_path / "path"
    folder.mkdir()
    usual = "bash sh env cat grep awk sed sha256sum mkdir dirname tail wc rm flock".split()
    for name in (*usual, *programs):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        ((), "a C compiler is needed and none was found"),
        (("cc",), "Python 3.11 is needed and none was found"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_sentence(tree, tmp_path, programs, sentence):
    shutil.rmtree(tree / ".venv")
    path = machine_with(tmp_path, *programs)
    process = bootstrap(tree, PATH=path, PYTHON="", CC="")
    assert process.returncode != 0
    assert sentence in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_another_python_is_not_taken(tree, tmp_path):
    shutil.rmtree(tree / ".venv")
    path = machine_with(tmp_path, "cc")
    write_program(tmp_path / "path" / "python3.11", "#!/bin/sh\nexit 1\n")
    assert "Python 3.11 is needed" in bootstrap(tree, PATH=path, PYTHON="").stderr


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """As from a shell: under `make test ARGS=...` the variables would be inherited."""
    inherited = {
        "MAKEFLAGS",
        "MAKELEVEL",
        "MAKEOVERRIDES",
        "MFLAGS",
        "ARGS",
        "MODEL",
        "PORT",
        "VENV",
    }
    environ = {name: value for name, value in os.environ.items() if name not in inherited}
    return subprocess.run(
        ["make", *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60
    )


def test_make_alone_explains_every_target():
    shown = make().stdout
    tests = "test test-all test-npu-emulated test-npu-emulated-torch-2.10 test-triton-ascend"
    for target in f"serve {tests} bench bench-gpu quality style doctor clean".split():
        assert f"  {target} " in shown


SERVING = """#!/bin/sh
[ "$2" = sglang.launch_server ] && echo "$@" && exit 0
exit 0
"""


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["MODEL=checkpoint"], "checkpoint --speculative-algorithm MTP --port 30000"),
        (
            ["PORT=1234", "ARGS=--dtype float32"],
            "/built/smollm2-mtp --speculative-algorithm MTP --port 1234 --dtype float32",
        ),
    ],
)
def test_make_serve_runs_the_server_with_the_one_flag(tree, arguments, command):
    (tree / "checkpoint").mkdir()
    write_program(tree / ".venv" / "bin" / "python", SERVING)
    write_program(tree / ".venv" / "bin" / "sglang-ascend", '#!/bin/sh\necho "/built/$2"\n')
    process = make("serve", *arguments, cwd=tree)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == f"-m sglang.launch_server --model-path {command}"


def test_make_serve_stops_where_the_model_is_unknown(tree):
    write_program(tree / ".venv" / "bin" / "python", SERVING)
    refuse = "#!/bin/sh\necho 'unknown model' >&2; exit 2\n"
    write_program(tree / ".venv" / "bin" / "sglang-ascend", refuse)
    process = make("serve", "MODEL=nosuch", cwd=tree)
    assert process.returncode != 0
    assert "unknown model" in process.stderr
    assert "launch_server" not in process.stdout


CI_TARGETS = ["test", "test-npu-emulated", "test-triton-ascend"]


@pytest.mark.parametrize("failing", ["nothing", "environments", *CI_TARGETS])
def test_continuous_integration_reports_failure_and_leaves_no_process(tmp_path, failing):
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    targets = ["venv-dev", "environments", *CI_TARGETS]
    recipe = f'@sleep 300 & echo $@ $$! >>left; [ "$@" != {failing} ]'
    (tmp_path / "Makefile").write_text(f"{' '.join(targets)}:\n\t{recipe}\n")
    process = subprocess.run(["bash", script], stdin=subprocess.DEVNULL, timeout=60)
    # An environment that could not be made is made, or refused, by the target that needs it.
    assert (process.returncode != 0) == (failing in CI_TARGETS)
    left = dict(line.split() for line in (tmp_path / "left").read_text().splitlines())
    ran = CI_TARGETS[: CI_TARGETS.index(failing) + 1] if failing in CI_TARGETS else CI_TARGETS
    assert set(left) - {"environments"} == {"venv-dev", *ran}
    for number in left.values():
        command = Path("/proc", number, "cmdline")
        assert not command.exists() or command.read_bytes() == b""  # ended, or a zombie
