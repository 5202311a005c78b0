#!/usr/bin/env bash
# The environment on an Ascend machine whose CANN is in place: install-npu.sh [VENV]
# As scripts/bootstrap.sh, with torch_npu beside torch and triton-ascend in the place of triton.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
export PIP_CONSTRAINT="$PWD/requirements/constraints-cpu.txt"
python3.11 -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --no-cache-dir "$@"; }

pip torch
"$venv/bin/python" - <<'CHECK'
import sys
from importlib.metadata import files

if any(file.name == "libc10_cuda.so" for file in files("torch")):
    sys.exit(
        "install-npu: torch is a CUDA build, the only one of PyPI for x86-64, and beside it torch_npu ends the "
        "process: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, remove the environment, run this again."
    )
CHECK
pip -r requirements/sglang-0.5.23-cpu.txt
pip --no-deps -r requirements/no-deps.txt
"$venv/bin/python" -m pip uninstall --yes triton
pip --no-deps -r requirements/npu.txt
pip --editable .

# torch must not be imported here: torch_npu would need the driver, which only a running container has.
"$venv/bin/python" - <<'CHECK'
from importlib.metadata import distributions, version

installed = {dist.name.lower() for dist in distributions()}
assert version("torch").startswith("2.13.0"), f"torch was replaced by {version('torch')}"
assert "triton" not in installed, "upstream triton is beside triton-ascend"
print("torch", version("torch"), "torch_npu", version("torch_npu"), "sglang", version("sglang"))
CHECK
