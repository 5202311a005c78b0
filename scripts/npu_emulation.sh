#!/usr/bin/env bash
# Runs a command on an emulated NPU: npu_emulation.sh VENV [--soc NAME] [--cann VERSION] COMMAND...
#
# VENV is an environment of its own, made here and refreshed when its requirements change. What stands in
# CANN's place is built inside it and reached by LD_LIBRARY_PATH of the command alone: docs/ascend-emulation.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/environment.sh"

venv=${1:?usage: npu_emulation.sh VENV [--soc NAME] [--cann VERSION] COMMAND...}
shift
requirements="$root/requirements/npu-emulated.txt"
constraints="$root/requirements/constraints-cpu.txt"
unset PYTHONHOME
export PYTHONPATH="$root:$root/tests${PYTHONPATH:+:$PYTHONPATH}"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "  making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
"$venv/bin/python" -m npu_emulation --check
wanted=$(cat "$requirements" "$constraints" | sha256sum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "  torch and torch_npu, for the emulated NPU (about 250 MB)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$constraints" --requirement "$requirements" ||
        die "pip failed; run the same command again to resume."
    printf '%s' "$wanted" >"$venv/.installed"
fi
export PATH="$(cd "$venv/bin" && pwd):$PATH"
exec "$venv/bin/python" -m npu_emulation "$@"
