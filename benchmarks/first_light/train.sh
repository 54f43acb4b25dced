#!/usr/bin/env bash
# Trains, then prints figures of the run: train.sh CONFIG RUN_DIR ARGUMENT...
rm -rf "$2"
if command -v nvidia-smi >/dev/null; then
    stdbuf -oL nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits -lms 500 >"$2.memory" 2>&1 &
    watch=$!
fi
python3 -m slime_like.commands.main train "$1" --run_dir "$2" --resume never --logging.progress plain "${@:3}"
code=$?
[ -z "${watch:-}" ] || kill "$watch"
python3 -m benchmarks.first_light.run_figures "$2" || code=1
# The last line of each kind that vLLM wrote about its start, its memory and its sleep.
grep -rhoE '(Sleep mode freed|CuMemAllocator: sleep freed|Model loading took|Graph capturing finished|init engine|CUDA graph pool|Available KV cache).*' \
    "$2/worker_logs" 2>/dev/null | awk '{ last[$1 $2] = $0 } END { for (kind in last) print "figures: " last[kind] }'
[ "$code" = 0 ] || tail -n 40 "$2"/worker_logs/*.log
rm -rf "$2/checkpoints"
exit "$code"
