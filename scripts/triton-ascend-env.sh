#!/usr/bin/env bash
# Makes or refreshes the environment of `make test-triton-ascend`: triton-ascend-env.sh VENV
#
# An environment of its own, because triton-ascend installs as `triton`. The tools of MLIR 19 are Debian's,
# unpacked into it without root; where they cannot be had, the tests that execute kernels are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh

venv=${1:?usage: triton-ascend-env.sh VENV}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME

# torch first and with its dependencies; a CUDA build of it brings upstream's triton along, which must go
# before triton-ascend writes the same folder.
install_packages() {
    # --no-compile: of the files a quarter is ever imported, and compiled then.
    "$venv/bin/python" -m pip install --no-compile --constraint requirements/constraints-cpu.txt \
        torch numpy pytest pytest-timeout pytest-xdist &&
        "$venv/bin/python" -m pip uninstall --yes triton &&
        "$venv/bin/python" -m pip install --no-compile --no-deps --requirement requirements/triton-ascend.txt
}

# Succeeds where Debian's packages are to be had; as root it also fetches a missing package list.
unpack_mlir() {
    local packages=(mlir-19-tools libmlir-19 libllvm19) folder="$venv/mlir"
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    rm -rf "$folder" && mkdir -p "$folder/packages"
    (
        cd "$folder/packages"
        apt-get download -qq "${packages[@]}" 2>/dev/null || {
            apt-get update -qq 2>/dev/null
            apt-get download -qq "${packages[@]}" 2>/dev/null
        }
    ) || return 1
    for package in "$folder"/packages/*.deb; do dpkg-deb --extract "$package" "$folder" || return 1; done
    rm -rf "$folder/packages"
    LD_LIBRARY_PATH="$folder/usr/lib/x86_64-linux-gnu" "$folder/usr/lib/llvm-19/bin/mlir-opt" --version >/dev/null 2>&1
}

wanted=$(cat "$0" requirements/triton-ascend.txt requirements/constraints-cpu.txt | sha256sum)
if [ "$(cat "$venv/.packages" 2>/dev/null)" != "$wanted" ]; then
    echo "  making $venv: torch, triton-ascend and its compiler (about 420 MB)"
    python=$(find_python)
    "$python" -m venv --clear "$venv" ||
        die "$python cannot make a virtual environment: install its venv module (Debian: python3.11-venv)."
    if ! install_packages >"$venv/bootstrap.log" 2>&1; then
        tail -n 25 "$venv/bootstrap.log" >&2
        die "pip failed (the whole log is $venv/bootstrap.log); run the same command again."
    fi
    printf '%s' "$wanted" >"$venv/.packages"
fi
if [ ! -f "$venv/.mlir" ]; then
    echo "  unpacking MLIR 19 into it (about 90 MB)"
    if unpack_mlir; then
        touch "$venv/.mlir"
    else
        rm -rf "$venv/mlir"
        echo "  MLIR 19 was not to be had: kernels will be lowered, but not executed" >&2
    fi
fi
