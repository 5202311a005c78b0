# What every script here that makes an environment begins with; sourced, not run.

die() {
    local name=${0##*/}
    echo "${name%.sh}: $*" >&2
    exit 1
}

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 is needed and none was found: install python3.11, or name one with PYTHON=/path/to/python3.11."
}
