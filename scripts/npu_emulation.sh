#!/usr/bin/env bash
# Runs a command on an emulated NPU: npu_emulation.sh VENV [--soc NAME] [--cann VERSION] COMMAND...
#
# VENV is an environment of its own, made here and refreshed when its requirements change: the real torch_npu,
# SGLang from its wheel, and this package, installed as a user would for its entry points. What stands in
# CANN's place is built inside it and reached by LD_LIBRARY_PATH of the command alone: docs/ascend-emulation.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/environment.sh"

venv=${1:?usage: npu_emulation.sh VENV [--soc NAME] [--cann VERSION] COMMAND...}
shift
requirements="$root/requirements"
unset PYTHONHOME
export PYTHONPATH="$root:$root/tests${PYTHONPATH:+:$PYTHONPATH}"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "  making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
"$venv/bin/python" -m npu_emulation --check
wanted=$(cat "$requirements"/{npu-emulated,sglang-0.5.23-cpu,no-deps,constraints-cpu}.txt "$root/pyproject.toml" | sha256sum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "  torch, torch_npu and SGLang, for the emulated NPU (about 800 MB; 4 minutes on two cores)"
    export PIP_CONSTRAINT="$requirements/constraints-cpu.txt" PIP_DISABLE_PIP_VERSION_CHECK=1
    install() {
        "$venv/bin/python" -m pip install --quiet "$@" || die "pip failed; run the same command again to resume."
    }
    install --requirement "$requirements/npu-emulated.txt" --requirement "$requirements/sglang-0.5.23-cpu.txt"
    install --no-deps --requirement "$requirements/no-deps.txt"
    install --editable "$root"
    printf '%s' "$wanted" >"$venv/.installed"
fi
export PATH="$(cd "$venv/bin" && pwd):$PATH"
exec "$venv/bin/python" -m npu_emulation "$@"
