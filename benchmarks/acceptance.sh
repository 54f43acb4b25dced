#!/usr/bin/env bash
# What takes longer than the test suite may: accuracy over seeds, with each engine, on eight ranks and with FSDP (also gone
# on with, from the middle, on two ranks), the control that must not learn, and the tests that are marked `acceptance`: among
# them a campaign of kills (KILLS and STOPS are their numbers) and fuzzed input (FUZZ=0:5000). Then Transformer Engine's
# layers, in an environment with Python 3.12.
#   bash benchmarks/acceptance.sh [OUT_DIR]      results go to benchmarks/results/acceptance.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
OUT="${1:-$REPO/runs/acceptance}"
cd "$REPO"
for seed in 0 1 2; do
    SEED=$seed DIR="$OUT/seed-$seed" bash scripts/quickstart.sh --logging.progress plain
done
from_seed_0() { # $1: name of the run; further flags
    local name="$1"
    shift
    "$VENV/bin/slime-like" train configs/quickstart.yaml --run_dir "$OUT/$name" --model.path "$OUT/seed-0/warm_start/hf" \
        --data.train "$OUT/seed-0/model/data/train.jsonl" --evaluation.files "$OUT/seed-0/model/data/eval.jsonl" \
        --resume never --logging.progress plain "$@"
}
for engine in sglang transformers; do
    from_seed_0 "$engine" --rollout.engine "$engine"
done
from_seed_0 control --debug.shuffle_advantages true
from_seed_0 fsdp --trainer.backend fsdp --checkpoint.every 60
from_seed_0 fsdp-on-two-ranks --trainer.backend fsdp --trainer.parallel.data 2 \
    --resume "$OUT/fsdp/checkpoints/step-000060"
from_seed_0 tp2-pp2-cp2 --trainer.parallel.tensor 2 --trainer.parallel.pipeline 2 --trainer.parallel.context 2
"$VENV/bin/python" -m benchmarks.acceptance "$OUT" benchmarks/results/acceptance.md
KILLS_DIR="$OUT/kills" FUZZ_DIR="$OUT/fuzz" "$VENV/bin/python" -m pytest -m acceptance tests
bash scripts/test_te.sh
