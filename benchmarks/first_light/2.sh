set -uo pipefail
# Second call, within 480 seconds: speed and memory of one trainer rank, next to the device's ceiling and the plan, the kernels of one
# step, and copies to host memory. Ends with tables; without a device, tiny models.
NUMBER=2 TOTAL=465
source "$(dirname "$0")/parts.sh"

seconds=$((TOTAL - SECONDS - 15))
part "trainer" "$seconds" python3 -m benchmarks.first_light.trainer --models "$KEPT/models" \
    --shapes "${SHAPES[@]}" --result "$OUT/trainer.md" --seconds "$((seconds - 5))"
for table in "$OUT/profile.md" "$OUT/trainer.md"; do
    [ ! -f "$table" ] || { echo && cat "$table"; }
done
finish
