# Sourced by 1.sh to 4.sh, after NUMBER and TOTAL (seconds): unpacks, runs parts one after another, prints their table.
#   part NAME SECONDS COMMAND...        runs a command within a time limit; a failure does not stop the others
#   on_device NAME SECONDS COMMAND...   the same, skipped without a CUDA device
#   finish                              prints the table; the exit code is 1 if a part failed
# A command's lines "figures: ..." go into the table. Everything it prints is in $OUT/log.txt.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT="${OUT:-$PWD/build/first_light/$NUMBER}"
export KEPT="${KEPT:-/tmp/slime-like-first-light}" # from one script to the next: packages, models, what failed
SITE="$KEPT/site"
mkdir -p "$OUT" "$SITE" "$KEPT/failed"
LOG="$OUT/log.txt"
: >"$LOG"
export PYTHONPATH="$PWD:$SITE" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A question for devices must not initialize CUDA: processes are forked afterwards.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
# Every process is on this machine, so NCCL and gloo need no other address.
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo RAY_USAGE_STATS_ENABLED=0 RAY_DISABLE_IMPORT_WARNING=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
SHAPES=(4b 32b-tp8 1.7b moe) # a large model, a tensor-parallel shard, a small one, experts
if [ "$GPUS" = 0 ]; then
    TOTAL=$((10 * TOTAL)) # a processor takes longer
    SHAPES=(tiny tiny tiny tiny-moe)
elif [ "$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)" -lt 100000 ]; then
    SHAPES[0]=8b-l12
fi
if [ -f "build/first_light/$NUMBER.tar.xz" ]; then tar -C "$SITE" -xJf "build/first_light/$NUMBER.tar.xz"; fi

ROWS=()
BAD=0
TRAIN=benchmarks/first_light/train.sh

slug() { printf '%s' "$1" | tr -c 'a-zA-Z0-9' '-'; }

part() { # $1: name, $2: seconds, then the command
    local start=$SECONDS offset left=$((TOTAL - SECONDS)) limit=$2 code outcome found
    [ "$GPUS" -gt 0 ] || limit=$((10 * limit))
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 10 ]; then
        row "$1" "no time left" 0 ""
        remember "$@"
        return
    fi
    printf '\n== %s, at most %s s: %s\n' "$1" "$limit" "${*:3}" >>"$LOG"
    offset=$(stat -c %s "$LOG")
    FIRST_LIGHT_PART="$$-$start" timeout --signal=INT --kill-after=10 "$limit" "${@:3}" >>"$LOG" 2>&1
    code=$?
    end_leftovers "$$-$start"
    found=$(tail -c "+$((offset + 1))" "$LOG" | sed -n -E 's/^figures: //p; s/^(=+ )?([0-9]+ (passed|failed|skipped|error).*) in [0-9].*/\2/p')
    outcome=passed
    case $code in
        0) [[ "$found" == *skipped* && "$found" != *passed* ]] && outcome=skipped ;;
        124 | 137) outcome="stopped after $limit s" ;;
        *) outcome="failed ($code)" ;;
    esac
    row "$1" "$outcome" "$((SECONDS - start))" "$(paste -sd';' <<<"$found" | sed 's/; */; /g')"
    if [[ "$outcome" == passed || "$outcome" == skipped ]]; then rm -f "$KEPT/failed/$(slug "$1")"; else
        BAD=1
        remember "$@"
        tail -n 12 "$LOG" >&2
    fi
}

on_device() {
    if [ "$GPUS" -gt 0 ]; then part "$@"; else row "$1" "skipped: no CUDA device" 0 ""; fi
}

remember() { # for 4.sh
    { printf 'part'; printf ' %q' "$@"; echo; } >"$KEPT/failed/$(slug "$1")"
}

row() {
    ROWS+=("| $1 | $2 | $3 | $4 |")
    echo "$NUMBER.sh, $SECONDS s: $1: $2" >&2
    table >"$OUT/table.md"
}

table() {
    printf '%s\n' '| part | outcome | seconds | figures |' '|---|---|---:|---|' "${ROWS[@]}"
}

# Processes that a part has left behind, also in sessions of their own, hold memory of the device.
end_leftovers() {
    local left
    left=$(grep -lz "^FIRST_LIGHT_PART=$1$" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)
    # shellcheck disable=SC2086
    [ -z "$left" ] || kill -9 $left 2>/dev/null
}

finish() {
    echo
    table
    exit "$BAD"
}
