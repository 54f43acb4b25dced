#!/usr/bin/env bash
# What one Hopper GPU does, within 15 minutes of it, in three calls on one machine:
#   bash benchmarks/first_light/run.sh 1|2|3 [SECONDS]      by default 270, 150 and 240 seconds
#   1  the machine's limits, GPU tests, and a run of reinforcement learning with trainer and engine in turns on one device
#   2  speed and memory of one trainer rank, next to the device's ceiling and the plan; the kernels of one step; copies to the host
#   3  vLLM with CUDA graphs and the trainer in turns: start, sleep, wake, weight sync, speed, gap; then what failed, again
# Every call ends with a table. Without a device, the same with tiny models on the processor, in ten times as many seconds.
# A machine with torch and transformers, but without a package index, gets the rest from pack.sh's archives in build/first_light:
# call 1 needs 1.tar.xz, call 2 brings 3.tar.xz, which takes long to unpack, and call 3 needs 2.tar.xz.
set -uo pipefail
BUDGETS=(270 150 240)
NUMBER=${1:?which call: 1, 2 or 3} TOTAL=${2:-${BUDGETS[$1 - 1]}}
source "$(dirname "$0")/parts.sh"

machine() {
    uname -rm && free -g && df -h /tmp /dev/shm
    nvidia-smi
    # torch.compile and Triton need a C compiler and Python's headers.
    echo "figures: $(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || uname -m)," \
        "$(nproc) cores, compilers: $(which cc gcc nvcc | paste -sd' ')"
    python3 - <<'END'
import sysconfig, platform
from importlib.metadata import version, PackageNotFoundError
from pathlib import Path
def of(name):
    try: return f"{name} {version(name)}"
    except PackageNotFoundError: return f"no {name}"
names = "torch transformers numpy triton ray megatron-core pydantic slime-like nvidia-nccl-cu13 setuptools".split()
headers = Path(sysconfig.get_path("include"), "Python.h").exists()
print(f"figures: Python {platform.python_version()} with{'' if headers else 'out'} headers,", ", ".join(map(of, names)))
END
}
export -f machine

tiny="$KEPT/tiny" large="$KEPT/models/${SHAPES[0]}" small="$KEPT/models/${SHAPES[2]}" tokens=256
[ "$GPUS" -gt 0 ] || tokens=32
common=(--reward.functions '[{name: length, options: {limit: 0, buffer: 1024}}]' --checkpoint.every 0 --checkpoint.export_hf false
    --logging.tensorboard false)
graphs='{vllm: {compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}, gpu_memory_utilization: 0.5}}'
rl() { # $1: engine; trains the small model on one GPU
    part "RL, $1" 190 bash "$TRAIN" configs/one_gpu.yaml "$KEPT/one_gpu_$1" --model.path "$small" --data.train "$small/data/train.jsonl" \
        --data.max_prompt_tokens 64 --rollout.max_new_tokens "$tokens" --rollout.engine "$1" --rollout.engine_args "$graphs" \
        --rollout.start_timeout_s 180 --steps 3 "${common[@]}"
}
by_engine() { # transformers generates if vLLM does not load
    [ "$GPUS" -gt 0 ] && ! failed "vLLM imports" && rl vllm && return
    rl transformers
}
trainer() { # the time that is left, for as many rows as it allows
    local seconds=$((TOTAL - SECONDS - 10))
    part "trainer" "$seconds" python3 -m benchmarks.first_light.trainer --models "$KEPT/models" --shapes "${SHAPES[@]}" \
        --result "$OUT/trainer.md" --seconds "$((seconds - 5))"
    cat "$OUT"/{profile,trainer}.md 2>/dev/null
}

# The parts: call, then what runs, by worth. A part that needs more time than is left is cut short, and listed.
at 1 part "machine" 10 bash -c machine
at 1 part "ceilings" 35 python3 -m benchmarks.first_light.ceilings
at 1 part "tiny model" 30 python3 -m slime_like.commands.main make-tiny-model "$tiny" --force
at 1 meanwhile python3 -m benchmarks.first_light.inputs "$KEPT/models" "${SHAPES[@]}"
at 1 part "GPU tests" 130 python3 -m pytest -q -rfs -p no:cacheprovider -m gpu -k "not transformer_engine and not flash-attn" \
    tests/gpu/test_{kernels,head,trainer,experts,score,fsdp}.py tests/unit/weights tests/gpu/test_one_device.py
at 1 on_device "CUDA IPC" 35 python3 -m pytest -q -rfs -p no:cacheprovider -m gpu -k colocated tests/process/test_collective_transport.py
at 1 part "RL, colocated" 70 bash "$TRAIN" configs/quickstart.yaml "$KEPT/rl" --model.path "$tiny" --model.dtype bfloat16 \
    --data.train "$tiny/data/train.jsonl" --evaluation.files "$tiny/data/eval.jsonl" --steps 5 --rollout.engine transformers \
    --cluster.placement colocated --trainer.optimizer.decay constant --trainer.optimizer.warmup_steps 0 "${common[@]}"

at 2 meanwhile unpack
at 2 trainer

at 3 part "vLLM imports" 40 python3 -m benchmarks.first_light.vllm_imports
at 3 by_engine
at 3 again
finish
