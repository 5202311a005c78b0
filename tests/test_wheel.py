"""`pip install` of the wheel gives a package that pulls in neither torch nor sglang, and is whole.

The wheel is installed with its dependencies into an empty environment, as a user would.
"""

import email
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "torch-npu", "torchvision", "sglang", "transformers", "triton"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def empty_environment(wheel, tmp_path_factory) -> Path:
    """The bin/ of a new environment that holds the wheel and what the wheel asks for."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run(
        [*pip, "--no-compile", str(wheel)],
        env=os.environ | {"PIP_CONSTRAINT": str(ROOT / "requirements" / "constraints-cpu.txt")},
        check=True,
        timeout=300,
    )
    return folder / "bin"


def run_in(environment: Path, *command: str) -> str:
    """Output of a command of that environment, run where no source tree is on the path."""
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", str(environment))}
    process = subprocess.run(
        [str(environment / command[0]), *command[1:]],
        cwd=environment,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "sglang_ascend").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == files
    assert any(name.startswith("sglang_ascend/models/artifacts/") for name in names)


def test_no_requirement_of_the_wheel_names_torch_or_sglang(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    required = {line.split(";")[0].strip(" <>=.0123456789") for line in requirements}
    assert required & {"torch", "torch-npu", "torch_npu", "torchvision", "sglang"} == set()
    unconditional = {line for line in requirements if "extra ==" not in line}
    assert not any(line.startswith("transformers") for line in unconditional)


def test_installing_the_wheel_installs_nothing_heavy(empty_environment):
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    installed = {name.lower() for name in run_in(empty_environment, "python", "-c", code).split()}
    assert "sglang-ascend" in installed
    assert installed & HEAVY == set()


def test_importing_the_package_imports_neither_torch_nor_sglang():
    """In this environment, where both are installed and could be imported."""
    code = "import sys, sglang_ascend.env; print({'torch', 'sglang'} & sys.modules.keys())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.strip() == "set()", process.stderr


def test_the_package_imports_in_the_empty_environment(empty_environment):
    code = "import sglang_ascend.env; print(sglang_ascend.__version__)"
    (metadata,) = empty_environment.parent.glob("lib/*/site-packages/sglang_ascend-*.dist-info")
    version = run_in(empty_environment, "python", "-c", code).strip()
    assert metadata.name == f"sglang_ascend-{version}.dist-info"


def test_the_console_command_explains_itself_without_torch(empty_environment):
    assert "doctor" in run_in(empty_environment, "sglang-ascend", "--help")
