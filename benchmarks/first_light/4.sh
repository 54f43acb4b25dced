set -uo pipefail
# Fourth call, within 200 seconds: parts of the earlier calls that failed, again, within what time is left; or those whose names are
# given. If there are none, a step next to TRL's GRPOTrainer, both with transformers' generation.
NUMBER=4 TOTAL=190
source "$(dirname "$0")/parts.sh"

again=0
for file in "$KEPT"/failed/*; do
    [ -f "$file" ] || continue
    [ $# -eq 0 ] || [[ " $(printf '%s ' "${@//[^a-zA-Z0-9]/-}")" == *" ${file##*/} "* ]] || continue
    again=1
    # shellcheck disable=SC1090
    source "$file"
done
if [ "$again" = 0 ]; then
    workload=(--shape 135m --prompts 64 --new-tokens 128)
    [ "$GPUS" -gt 0 ] || workload=(--shape tiny --prompts 8 --new-tokens 16)
    step=(python3 -m benchmarks.step "${workload[@]}" --steps 8 --rounds 1 --processes 1 --out "$KEPT/step" --result "$OUT/step.md")
    part "step, next to TRL" 180 bash -c '"$@" && awk -F"|" "/^\| [0-9]/ && NF > 9 { print \"figures: ours\" \$5 \"s, TRL\" \$6 \"s\" }" "$OUT/step.md"' - "${step[@]}"
    [ ! -f "$OUT/step.md" ] || cat "$OUT/step.md"
fi
finish
