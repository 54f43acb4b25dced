set -uo pipefail
# Third call, within 560 seconds: vLLM with CUDA graphs and the trainer in turns on one GPU, configs/one_gpu.yaml with a random
# Qwen3-1.7B: start, sleep, wake, weight sync, speed. transformers generates if vLLM does not load. Ends with a table.
NUMBER=3 TOTAL=545
source "$(dirname "$0")/parts.sh"

export VLLM_LOGGING_LEVEL=INFO # what it says of its memory
shape=${SHAPES[2]} tokens=512 engine=vllm
graphs='{vllm: {compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}, gpu_memory_utilization: 0.5}}'
[ "$GPUS" -gt 0 ] || { tokens=32 engine=transformers; }
model="$KEPT/models/$shape"

part "vLLM imports" 90 python3 -m benchmarks.first_light.vllm_imports
[ ! -f "$KEPT/failed/$(slug "vLLM imports")" ] || engine=transformers
part "model" 90 python3 -m benchmarks.first_light.inputs "$KEPT/models" "$shape"
run() { # $1: name of the part, $2: run, $3: seconds, $4: engine, then further settings
    part "$1" "$3" bash "$TRAIN" configs/one_gpu.yaml "$KEPT/$2" --model.path "$model" --data.train "$model/data/train.jsonl" \
        --data.max_prompt_tokens 64 --rollout.max_new_tokens "$tokens" --rollout.engine "$4" --rollout.engine_args "$graphs" \
        --reward.functions '[{name: length, options: {limit: 0, buffer: 1024}}]' --rollout.start_timeout_s 300 \
        --checkpoint.every 0 --checkpoint.export_hf false --logging.tensorboard false "${@:5}"
}
run "RL, $engine" one_gpu 330 "$engine" --steps 5
if [ "$engine" = vllm ] && [ -f "$KEPT/failed/$(slug "RL, vllm")" ]; then run "RL, transformers" one_gpu_transformers 200 transformers --steps 3; fi
run "RL, $engine, top_p" truncated 150 "$engine" --steps 2 --rollout.top_p 0.95 --rollout.top_k 50
finish
