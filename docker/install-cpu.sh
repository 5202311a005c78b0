#!/usr/bin/env bash
# The image's copy of what `make serve` prepares: the environment and the default checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh .venv
.venv/bin/sglang-ascend model-path smollm2-mtp
rm -rf ~/.cache/pip
