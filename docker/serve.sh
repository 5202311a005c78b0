#!/usr/bin/env bash
# Serves MODEL (a catalogue name or a folder) on PORT of HOST; arguments go to SGLang's launch_server.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${MODEL:-smollm2-mtp}
[ -d "$model" ] || model=$(.venv/bin/sglang-ascend model-path "$model")
exec .venv/bin/python -m sglang.launch_server --model-path "$model" --speculative-algorithm MTP \
    --host "${HOST:-0.0.0.0}" --port "${PORT:-30000}" "$@"
