#!/usr/bin/env bash
# Serves MODEL (a catalogue name or a folder) on PORT of HOST; arguments go to SGLang's launch_server.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3 # the base image's, which has SGLang

model=${MODEL:-smollm2-mtp}
[ -d "$model" ] || model=$("$python" -m sglang_ascend model-path "$model")
exec "$python" -m sglang.launch_server --model-path "$model" --speculative-algorithm MTP \
    --host "${HOST:-0.0.0.0}" --port "${PORT:-30000}" "$@"
