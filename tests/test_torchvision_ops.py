"""A CUDA torchvision imports beside a CPU torch, and `import torch` is never the worse for it.

Each case is a process of its own: operators are defined once for the life of a process.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sglang_ascend.torchvision_ops import is_cuda_build

REGISTERED = """
from sglang_ascend.torchvision_ops import SCHEMAS, is_registered
print(sorted(name for name in SCHEMAS if is_registered(name)))
"""


def run(code: str, *, autoload: bool = True, first_on_path: Path | None = None):
    environ = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    if first_on_path:
        environ["PYTHONPATH"] = str(first_on_path)
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )


def fake_torchvision(folder: Path, version_source: str) -> Path:
    """A torchvision that must not be imported, only looked at."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('torchvision was imported')")
    (package / "version.py").write_text(version_source)
    return folder


def output(process) -> str:
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def is_cuda_torchvision_beside_cpu_torch() -> bool:
    import torch
    import torchvision

    return torch.version.cuda is None and "+cu" in torchvision.__version__


def test_torchvision_imports_as_soon_as_torch_is_imported():
    expected = version("torchvision")
    process = run("import torch, torchvision; print(torchvision.__version__)")
    assert output(process).startswith(expected)


def test_without_the_entry_point_the_import_fails_where_the_builds_do_not_match():
    """The control: on matching builds there is nothing to repair, so there it must succeed."""
    process = run("import torch, torchvision", autoload=False)
    if is_cuda_torchvision_beside_cpu_torch():
        assert process.returncode != 0
        assert "torchvision::nms does not exist" in process.stderr
    else:
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("version_source", "expected"),
    [
        ("__version__ = '0.28.0+cu130'\ncuda = check()", True),
        ("__version__ = '0.28.0+cpu'", False),
        ("__version__ = '0.28.0'", False),
        ("", False),
    ],
)
def test_a_cuda_build_is_told_by_its_local_version(version_source, expected):
    assert is_cuda_build(version_source) is expected


def test_nothing_is_defined_beside_a_cpu_torchvision(tmp_path):
    fake = fake_torchvision(tmp_path, "__version__ = '0.28.0+cpu'\n")
    assert output(run("import torch" + REGISTERED, first_on_path=fake)) == "[]"


def test_a_cuda_torchvision_is_recognised_without_being_imported(tmp_path):
    fake = fake_torchvision(tmp_path, "__version__ = '0.28.0+cu130'\n")
    assert output(run("import torch" + REGISTERED, first_on_path=fake)) == "['nms', 'qnms']"


def test_nothing_is_defined_beside_a_torch_with_cuda(tmp_path):
    code = "import torch; torch.version.cuda = '13.0'\n"
    code += "from sglang_ascend.torchvision_ops import define_missing_ops; define_missing_ops()"
    fake = fake_torchvision(tmp_path, "__version__ = '0.28.0+cu130'\n")
    assert output(run(code + REGISTERED, autoload=False, first_on_path=fake)) == "[]"


def test_an_operator_that_exists_is_left_alone(tmp_path):
    code = """
import torch
mine = torch.library.Library("torchvision", "DEF")
mine.define("nms(Tensor a) -> Tensor")
from sglang_ascend.torchvision_ops import define_missing_ops
define_missing_ops()
define_missing_ops()
print(torch.ops.torchvision.nms.default._schema)
"""
    fake = fake_torchvision(tmp_path, "__version__ = '0.28.0+cu130'\n")
    process = run(code, autoload=False, first_on_path=fake)
    assert output(process) == "torchvision::nms(Tensor a) -> Tensor"
    assert "could not define" not in process.stderr


def test_a_torchvision_that_cannot_be_read_costs_a_warning_and_not_the_import(tmp_path):
    fake = fake_torchvision(tmp_path, "__version__ = build()\n")
    process = run("import torch; print('imported')", first_on_path=fake)
    assert output(process) == "imported"
    assert "could not define torchvision's operators" in process.stderr
