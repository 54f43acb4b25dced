#!/usr/bin/env bash
# From a fresh clone to a trained model on a CPU: environment, tiny model and data, supervised warm start, RL.
# Further arguments go to the RL run, e.g. --rollout.engine transformers. SEED=n chooses the seed, DIR=path the directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer_help "$0" "$@"
ensure_environment
cd "$REPO"
SEED="${SEED:-0}"
DIR="${DIR:-runs/quickstart}"
SLIME="$VENV/bin/slime-like"
started=$SECONDS

say "making a tiny Qwen3 and sums of two numbers below 50 in $DIR/model"
"$SLIME" make-tiny-model "$DIR/model" --family qwen3 --seed "$SEED" --force

say "supervised warm start"
"$SLIME" train configs/quickstart_warm_start.yaml --resume never --seed "$SEED" --run_dir "$DIR/warm_start" \
    --model.path "$DIR/model" --data.train "$DIR/model/data/sft.jsonl"

say "reinforcement learning"
"$SLIME" train configs/quickstart.yaml --resume never --seed "$SEED" --run_dir "$DIR/rl" --model.path "$DIR/warm_start/hf" \
    --data.train "$DIR/model/data/train.jsonl" --evaluation.files "$DIR/model/data/eval.jsonl" "$@"
say "warm start and RL took $((SECONDS - started)) s"
