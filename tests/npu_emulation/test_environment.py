"""The emulated NPU runs only where CANN is not, touches no package, and is the SoC one asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_emulation.environment import (
    SOCS,
    CannPresentError,
    build_folder,
    emulated_environment,
    require_no_cann,
)


def refusal(environ: dict[str, str], **places: Path) -> str:
    with pytest.raises(CannPresentError) as error:
        require_no_cann(environ, **places)
    return str(error.value)


def test_it_refuses_where_cann_is_set_up():
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        assert f"{variable} is set" in refusal({variable: "/opt/cann"})


def test_it_refuses_where_cann_is_installed(tmp_path):
    assert f"{tmp_path} exists" in refusal({}, cann_folder=tmp_path)


def test_it_refuses_where_another_runtime_is_on_the_library_path(tmp_path):
    (tmp_path / "libascendcl.so").touch()
    environ = {"LD_LIBRARY_PATH": f"/nonexistent:{tmp_path}"}
    assert "libascendcl.so is on LD_LIBRARY_PATH" in refusal(environ)
    require_no_cann(environ, build=tmp_path)


def run_on(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=120
    )


def test_the_command_refuses_in_one_sentence():
    environ = os.environ | {"ASCEND_HOME_PATH": "/opt/cann"}
    process = run_on(environ, "-m", "npu_emulation", "echo", "started")
    assert process.returncode == 1 and process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert "does not run where CANN is present (ASCEND_HOME_PATH is set): use a machine" in line


def test_no_installed_package_has_an_emulated_library():
    packages = Path(torch.__file__).parents[1]
    assert not build_folder().is_relative_to(packages)
    built = {path.name for path in build_folder().glob("*.so")}
    assert "libascendcl.so" in built
    assert built & {path.name for path in packages.rglob("*.so")} == set()


def test_without_the_library_path_torch_npu_does_not_load():
    environ = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    process = run_on(environ, "-c", "import torch_npu")
    assert process.returncode != 0
    assert "cannot open shared object file" in process.stderr


def test_torch_answers_as_a_cpu_build_does():
    asked = "torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count()"
    process = run_on(dict(os.environ), "-c", f"import torch; print({asked})")
    assert process.stdout.splitlines()[-1:] == ["None False 0"], process.stderr


# The numbers of enum SocVersion in torch_npu's NpuVariables.h.
SOC_NUMBERS = dict(zip(SOCS, (223, 251, 260), strict=True))


@pytest.mark.parametrize("soc", SOCS)
def test_torch_npu_takes_the_device_for_the_soc_that_was_asked_for(soc):
    environ = emulated_environment(os.environ, build_folder(), soc=soc)
    asked = "torch.npu.get_device_name(), torch_npu._C._npu_get_soc_version()"
    process = run_on(environ, "-c", f"import torch, torch_npu; print({asked})")
    assert process.stdout.split()[-2:] == [soc, str(SOC_NUMBERS[soc])], process.stderr


ROPE_ATTENTION = """
import torch, torch_npu
def new(*shape): return torch.empty(*shape, device="npu", dtype=torch.bfloat16)
latent, rope = new(8, 128, 512), new(8, 128, 64)
torch_npu.npu_fused_infer_attention_score(
    new(2, 1, 32, 512), latent, latent, query_rope=new(2, 1, 32, 64), key_rope=rope, num_heads=32,
    num_key_value_heads=1, input_layout="BSND", block_size=128, actual_seq_lengths_kv=[5, 5],
    block_table=torch.empty(2, 2, device="npu", dtype=torch.int32))
print("accepted")
"""


@pytest.mark.parametrize(("cann", "accepts"), [("8.0.0", False), ("8.5.0", True)])
def test_torch_npu_sees_the_cann_version_that_was_asked_for(cann, accepts):
    """Attention with rotary operands is one of the features that it refuses before 8.1."""
    environ = emulated_environment(os.environ, build_folder(), cann=cann)
    process = run_on(environ, "-c", ROPE_ATTENTION)
    assert ("accepted" in process.stdout) == accepts, process.stderr
    assert accepts or "CANN version" in process.stderr


def test_the_device_is_there_and_one():
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
