#!/usr/bin/env bash
# What takes longer than the test suite may: accuracy over seeds, and the control that must not learn.
#   bash benchmarks/acceptance.sh [OUT_DIR]      results go to benchmarks/results/acceptance.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
OUT="${1:-$REPO/runs/acceptance}"
cd "$REPO"
for seed in 0 1 2; do
    SEED=$seed DIR="$OUT/seed-$seed" bash scripts/quickstart.sh --logging.progress plain
done
"$VENV/bin/slime-like" train configs/quickstart.yaml --run_dir "$OUT/control" --model.path "$OUT/seed-0/warm_start/hf" \
    --data.train "$OUT/seed-0/model/data/train.jsonl" --evaluation.files "$OUT/seed-0/model/data/eval.jsonl" \
    --debug.shuffle_advantages true --logging.progress plain
"$VENV/bin/python" -m benchmarks.acceptance "$OUT" benchmarks/results/acceptance.md
