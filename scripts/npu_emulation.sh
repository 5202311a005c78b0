#!/usr/bin/env bash
# Runs a command on an emulated NPU: npu_emulation.sh VENV [--torch 2.10] [--soc NAME] [--cann VERSION] COMMAND...
#
# VENV is an environment of its own, made here and refreshed when its requirements change: the real torch_npu,
# SGLang from its wheel, and this package, installed as a user would for its entry points. What stands in
# CANN's place is built inside it and reached by LD_LIBRARY_PATH of the command alone: docs/ascend-emulation.md.
# --torch 2.10 makes VENV of that torch and its torch_npu; from then on it is VENV's, and need not be said.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/environment.sh"

venv=${1:?usage: npu_emulation.sh VENV [--torch 2.10] [--soc NAME] [--cann VERSION] COMMAND...}
shift
torch=$(cat "$venv/.torch" 2>/dev/null || echo 2.13)
if [ "${1:-}" = --torch ]; then
    torch=${2:?--torch takes 2.10 or 2.13}
    shift 2
fi
[[ $torch == 2.10 || $torch == 2.13 ]] || die "--torch takes 2.10 or 2.13, not $torch."

# torch_npu is made for the CPU build. Beside libc10_cuda.so it ends the process, for both register settings of the
# allocator, and SGLang takes a torch that names a CUDA for one with a GPU. stubs.py stands in for what is removed.
as_cpu_build() {
    rm -f "$1"/lib/lib{torch_cuda,torch_cuda_linalg,torch_nvshmem,c10_cuda,caffe2_nvrtc}.so
    sed -i -E 's/\+cu[0-9]+/+cpu/; s/^(cuda: .* =) .*/\1 None/' "$1/version.py"
}

requirements="$root/requirements"
unset PYTHONHOME PYTHONDONTWRITEBYTECODE # what is imported first is compiled then
export PYTHONPATH="$root:$root/tests${PYTHONPATH:+:$PYTHONPATH}"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "  making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
"$venv/bin/python" -m npu_emulation --check
other_torch="$requirements/npu-torch-$torch.txt"
[ -f "$other_torch" ] || other_torch=/dev/null
wanted=$(cat "$requirements"/{npu-emulated,sglang-0.5.23-cpu,no-deps,constraints-cpu}.txt "$other_torch" "$root/pyproject.toml" | sha256sum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    echo "  torch, torch_npu and SGLang, for the emulated NPU (about 800 MB; 4 minutes on two cores)"
    export PIP_CONSTRAINT="$requirements/constraints-cpu.txt" PIP_DISABLE_PIP_VERSION_CHECK=1
    # Of its 29,000 files a quarter is ever imported, and compiled then.
    install() {
        "$venv/bin/python" -m pip install --quiet --no-compile "$@" || die "pip failed; run the same command again to resume."
    }
    install --requirement "$requirements/npu-emulated.txt" --requirement "$requirements/sglang-0.5.23-cpu.txt"
    install --no-deps --requirement "$requirements/no-deps.txt"
    if [ "$other_torch" != /dev/null ]; then
        echo "  torch $torch in place of that (900 MB more)"
        PIP_CONSTRAINT= install --no-deps --requirement "$other_torch"
        as_cpu_build "$venv/lib/python3.11/site-packages/torch"
    fi
    install --editable "$root"
    printf '%s' "$torch" >"$venv/.torch"
    printf '%s' "$wanted" >"$venv/.installed"
fi
export PATH="$(cd "$venv/bin" && pwd):$PATH"
exec "$venv/bin/python" -m npu_emulation "$@"
