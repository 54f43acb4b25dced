# Sourced by run.sh, after NUMBER and TOTAL (seconds): unpacks, runs parts one after another, prints their table.
#   at CALL COMMAND...                  runs a command, one of these or another, in this call only
#   part NAME SECONDS COMMAND...        runs a command within a time limit; a failure does not stop the others
#   on_device NAME SECONDS COMMAND...   the same, skipped without a CUDA device
#   meanwhile COMMAND...                runs a command next to the parts that follow
#   again                               runs parts of all calls once more that failed or had no time, in their order
#   finish                              ends what runs meanwhile, prints the table, and exits with 1 if a part failed
# A command's lines "figures: ..." go into the table. Everything it prints is in $OUT/log.txt.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT="${OUT:-$PWD/build/first_light/$NUMBER}"
export KEPT="${KEPT:-/tmp/slime-like-first-light}" # from one script to the next: packages, models, what failed
SITE="$KEPT/site"
mkdir -p "$OUT" "$SITE" "$KEPT"
LOG="$OUT/log.txt" FAILED="$KEPT/failed"
: >"$LOG"
: >"$LOG.meanwhile"
[ "$NUMBER" != 1 ] || : >"$FAILED"
export PYTHONPATH="$PWD:$SITE" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A question for devices must not initialize CUDA: processes are forked afterwards.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
# Every process is on this machine, so NCCL and gloo need no other address.
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo RAY_USAGE_STATS_ENABLED=0 RAY_DISABLE_IMPORT_WARNING=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=INFO # what it says of its memory
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
SHAPES=(4b 32b-tp8 0.6b moe) # a large model, a tensor-parallel shard, a small one, experts
if [ "$GPUS" = 0 ]; then
    TOTAL=$((10 * TOTAL)) # a processor takes longer
    SHAPES=(tiny tiny tiny tiny-moe)
elif [ "$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)" -lt 100000 ]; then
    SHAPES[0]=8b-l12
fi
unpack() {
    local archive
    for archive in build/first_light/[1-3].tar.xz; do
        [ "$archive" -nt "$KEPT/${archive##*/}" ] || continue # unpacked before, or there is none
        tar -C "$SITE" -xJf "$archive" && touch "$KEPT/${archive##*/}"
    done
}
[ "$NUMBER" = 2 ] || unpack

ROWS=()
BAD=0
TRAIN=benchmarks/first_light/train.sh

at() { [ "$1" != "$NUMBER" ] || "${@:2}"; }

meanwhile() { "$@" >>"$LOG.meanwhile" 2>&1 & }

part() { # $1: name, $2: seconds, then the command
    local start=$SECONDS offset left=$((TOTAL - SECONDS)) limit=$2 code outcome found
    [ "$GPUS" -gt 0 ] || limit=$((10 * limit))
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 10 ]; then
        row "$1" "no time left" 0 ""
        remember "$@"
        return 1
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
    [[ "$outcome" == passed || "$outcome" == skipped ]] && return
    BAD=1
    remember "$@"
    tail -n 12 "$LOG" >&2
    return 1
}

on_device() {
    if [ "$GPUS" -gt 0 ]; then part "$@"; else row "$1" "skipped: no CUDA device" 0 ""; fi
}

remember() { printf '%q ' part "$@" >>"$FAILED" && echo >>"$FAILED"; }

failed() { grep -qF "part $(printf '%q' "$1") " "$FAILED"; }

again() {
    local parts=()
    mapfile -t parts <"$FAILED"
    : >"$FAILED"
    for each in "${parts[@]}"; do eval "$each"; done
}

row() {
    ROWS+=("| $1 | $2 | $3 | $4 |")
    echo "call $NUMBER, $SECONDS s: $1: $2" >&2
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
    while [ -n "$(jobs -r)" ] && [ "$SECONDS" -lt "$TOTAL" ]; do sleep 1; done
    for job in $(jobs -rp); do
        kill "$job"
        BAD=1
        row "what ran meanwhile" "no time left" 0 ""
    done
    echo
    table
    exit "$BAD"
}
