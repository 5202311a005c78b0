"""The images' definitions are clean, and each of their steps is a script that runs.

No docker engine is needed and none is used, so neither image is claimed to build. Their base
images are not at hand either: `apt-get` and `useradd` are recorded here, for they would change the
machine; test_image_steps.py resolves the package names and runs the installations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from build_context import (
    FOLDER,
    IMAGES,
    ROOT,
    command,
    copy_context,
    run_scripts,
    values,
)

from sglang_ascend.plugin.compat import SUPPORTED_SGLANG

both_images = pytest.mark.parametrize("image", IMAGES)
# `-m sglang_ascend model-path NAME` prints a folder; any other call its words.
PYTHON = """#!/bin/sh
[ "$2" = sglang_ascend ] || { printf "%s\\n" "$@"; exit; }
[ "$4" != nosuch ] || exit 2
echo "/built/$4"
"""
RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n'


def run(*words: str | Path, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def hadolint(*files: Path) -> subprocess.CompletedProcess:
    return run(Path(sys.executable).parent / "hadolint", "--no-color", *files)


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@both_images
def test_hadolint_finds_nothing(image):
    found = hadolint(FOLDER / image)
    assert (found.returncode, found.stdout) == (0, "")


def test_hadolint_finds_a_mistake(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN apt-get install git\n")
    found = hadolint(bad)
    assert found.returncode != 0
    assert "DL3007" in found.stdout and "DL3015" in found.stdout


@both_images
def test_every_step_is_a_script_of_this_repository(image):
    scripts = run_scripts(image)
    assert scripts
    for script in [*scripts, *(ROOT / word for word in command(image, "CMD"))]:
        assert script.is_file() and os.access(script, os.X_OK), script


@both_images
def test_every_script_is_valid_shell(image):
    for script in run_scripts(image):
        assert run("bash", "-n", script).returncode == 0


@both_images
def test_what_serves_is_not_root_and_is_looked_after(image):
    assert values(image, "USER")[-1] == "1000:1000"
    assert values(image, "WORKDIR") == ["/home/sglang/sglang-ascend"]
    assert command(image, "HEALTHCHECK") == ["docker/health.sh"]
    assert command(image, "CMD") == ["docker/serve.sh"]


def test_the_base_is_sglangs_image_of_the_version_that_is_served_for_a2_and_a3():
    arguments = dict(value.split("=") for value in values("Dockerfile", "ARG"))
    (base,) = values("Dockerfile", "FROM")
    for chip in ("910b", "a3"):
        name = base.replace("${SGLANG_IMAGE}", arguments["SGLANG_IMAGE"]).replace("${CHIP}", chip)
        assert name == f"quay.io/ascend/sglang:v{SUPPORTED_SGLANG}-cann9.0.0-{chip}"
    assert arguments["CHIP"] == "910b"


@pytest.fixture
def recorded(tmp_path) -> dict[str, str]:
    """An environment whose apt-get, useradd, install and rm only write down their calls."""
    for name in ("apt-get", "useradd", "install", "rm"):
        write_program(tmp_path / "bin" / name, RECORD)
    calls = tmp_path / "calls"
    calls.touch()
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)}


def test_packages_are_installed_from_a_fresh_list_that_is_not_kept(recorded):
    assert run(FOLDER / "system-packages.sh", **recorded).returncode == 0
    update, install, remove = Path(recorded["CALLS"]).read_text().splitlines()
    assert update == "apt-get update"
    assert install.startswith("apt-get install --yes --no-install-recommends ")
    assert remove.startswith("rm -rf /var/lib/apt/lists/")


def test_the_user_is_the_one_that_the_images_name(recorded):
    assert run(FOLDER / "add-user.sh", **recorded).returncode == 0
    add, folder = Path(recorded["CALLS"]).read_text().splitlines()
    assert "--uid 1000" in add and add.endswith(" sglang")
    assert folder.endswith(values("Dockerfile", "WORKDIR")[0])


def test_a_step_that_fails_stops_the_build(recorded, tmp_path):
    write_program(tmp_path / "bin" / "apt-get", "#!/bin/sh\nexit 100\n")
    assert run(FOLDER / "system-packages.sh", **recorded).returncode == 100


def test_the_context_has_what_the_steps_need_and_no_more(tmp_path):
    context = copy_context(tmp_path)
    for needed in (
        "scripts/bootstrap.sh",
        "requirements/no-deps.txt",
        "pyproject.toml",
        "README.md",
    ):
        assert (context / needed).is_file(), needed
    assert (context / "sglang_ascend/models/artifacts/nano-deepseek/model.safetensors").is_file()
    for left_out in ("tests", "benchmarks", ".git", ".ci", ".venv"):
        assert not (context / left_out).exists(), left_out
    assert not list(context.rglob("__pycache__"))


def test_canns_environment_is_there_for_the_command(tmp_path):
    """As CANN's own entry point sets it; variables that its scripts read may be unset."""
    write_program(tmp_path / "ascend-toolkit/set_env.sh", "export TOOLKIT=1$NEVER_SET\n")
    folder = tmp_path / "cann-8.5.0/share/info/ascendnpu-ir/bin"
    write_program(folder / "set_env.sh", "export BISHENG=$TOOLKIT\n")
    write_program(tmp_path / "nnal/atb/set_env.sh", "export ATB=1\n")
    shown = run(
        FOLDER / "with-cann.sh", "sh", "-c", 'echo "$TOOLKIT $BISHENG $ATB $0"', "a b",
        ASCEND_ROOT=str(tmp_path),
    )  # fmt: skip
    assert shown.stdout == "1 1 1 a b\n"
    assert run(FOLDER / "with-cann.sh", "true", ASCEND_ROOT=str(tmp_path / "none")).returncode == 0


@pytest.fixture
def served_tree(tmp_path) -> Path:
    """The context with an environment that only says how it was called."""
    write_program(tmp_path / ".venv" / "bin" / "python", PYTHON)
    for name in ("serve.sh", "health.sh"):
        write_program(tmp_path / "docker" / name, (FOLDER / name).read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({}, "--model-path /built/smollm2-mtp --host 0.0.0.0 --port 30000"),
        ({"MODEL": "nano-deepseek", "PORT": "31000"}, "--model-path /built/nano-deepseek"),
        ({"MODEL": "/", "HOST": "127.0.0.1"}, "--model-path / --host 127.0.0.1 --port 30000"),
    ],
)
def test_the_server_gets_the_model_and_the_address(served_tree, variables, flags):
    unset = {"MODEL": "", "PORT": "", "HOST": ""} | variables
    shown = run(served_tree / "docker/serve.sh", "--dtype", "float32", **unset)
    words = shown.stdout.split()
    assert words[:2] == ["-m", "sglang.launch_server"]
    assert words[-2:] == ["--dtype", "float32"]
    assert " ".join(words).replace("--speculative-algorithm MTP ", "").count(flags) == 1


def test_without_an_environment_of_its_own_the_images_python_serves(served_tree, tmp_path):
    (served_tree / ".venv").rename(served_tree / "elsewhere")
    (served_tree / "elsewhere/bin/python").rename(served_tree / "elsewhere/bin/python3")
    path = f"{served_tree / 'elsewhere/bin'}:{os.environ['PATH']}"
    for script, word in (("serve.sh", "/built/smollm2-mtp"), ("health.sh", "/health")):
        assert word in run(served_tree / "docker" / script, PATH=path, MODEL="").stdout


def test_an_unknown_model_ends_the_container(served_tree):
    assert run(served_tree / "docker/serve.sh", MODEL="nosuch").returncode == 2


def test_health_is_the_servers_answer_on_the_containers_own_port(served_tree):
    shown = run(served_tree / "docker/health.sh", PORT="31000").stdout.splitlines()
    assert shown[-1] == "http://127.0.0.1:31000/health"


@pytest.mark.parametrize("library", ["libc10_cuda.so", "libc10.so"])
def test_a_torch_beside_which_torch_npu_ends_the_process_stops_the_install(tmp_path, library):
    """Pip and the environment are stood in for; torch is what its list of files says."""
    info = tmp_path / "packages" / "torch-2.13.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (info / "RECORD").write_text(f"torch/lib/{library},,\n")
    tools, log = tmp_path / "tools", tmp_path / "pip.log"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    tools.mkdir()
    asked = f'[ "$2" = pip ] && echo "$@" >>{log} && exit\n'
    base = Path(sys.base_prefix) / "bin" / "python3"
    python = f'#!/bin/sh\n{asked}PYTHONPATH={info.parent} exec {base} -S "$@"\n'
    for path, text in (
        (tmp_path / "venv" / "bin" / "python", python),
        (tools / "python3.11", "#!/bin/sh\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    environ = {"PATH": f"{tools}:/usr/bin:/bin"}
    words = [ROOT / "docker/install-npu.sh", tmp_path / "venv"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    is_cuda = "CUDA build" in done.stderr
    assert done.returncode != 0  # behind it the other packages are missing, for nothing installs
    assert is_cuda == (library == "libc10_cuda.so")
    assert len(log.read_text().splitlines()) == (1 if is_cuda else 6)
