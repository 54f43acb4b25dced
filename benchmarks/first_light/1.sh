set -uo pipefail
# First of four calls on one GPU, within 400 seconds: the machine's limits, GPU tests, and a whole run of reinforcement learning in
# bfloat16 with trainer and engine in turns on one device. Ends with a table; without a device, the same on the processor.
NUMBER=1 TOTAL=385
source "$(dirname "$0")/parts.sh"

machine() {
    uname -rm && free -g && df -h /tmp /dev/shm
    nvidia-smi
    # torch.compile and Triton need a C compiler and Python's headers.
    echo "figures: $(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || uname -m)," \
        "$(nproc) cores, compilers: $(which cc gcc nvcc | paste -sd' ')"
    python3 - <<'END'
import platform, sysconfig
from importlib.metadata import version, PackageNotFoundError
from pathlib import Path
def of(name):
    try: return f"{name} {version(name)}"
    except PackageNotFoundError: return f"no {name}"
names = "torch transformers numpy triton numba ray megatron-core pydantic trl slime-like nvidia-nccl-cu13 setuptools".split()
headers = Path(sysconfig.get_path("include"), "Python.h").exists()
print(f"figures: Python {platform.python_version()} with{'' if headers else 'out'} headers,", ", ".join(map(of, names)))
END
}
export -f machine

data="$KEPT/tiny/data"
given=(--model.dtype bfloat16 --logging.tensorboard false)
part "machine" 40 bash -c machine
part "ceilings" 60 python3 -m benchmarks.first_light.ceilings
part "GPU tests" 200 python3 -m pytest -q -rfs -p no:cacheprovider -m gpu \
    -k "not transformer_engine and not flash-attn" tests/gpu tests/unit/weights
on_device "CUDA IPC" 80 python3 -m pytest -q -rfs -p no:cacheprovider -m gpu -k colocated tests/process/test_collective_transport.py
part "tiny model" 60 python3 -m slime_like.commands.main make-tiny-model "$KEPT/tiny" --force
part "warm start" 120 bash "$TRAIN" configs/quickstart_warm_start.yaml "$KEPT/warm" "${given[@]}" \
    --model.path "$KEPT/tiny" --data.train "$data/sft.jsonl" --steps 100
part "RL, colocated" 180 bash "$TRAIN" configs/quickstart.yaml "$KEPT/rl" "${given[@]}" \
    --model.path "$KEPT/warm/hf" --data.train "$data/train.jsonl" --evaluation.files "$data/eval.jsonl" --steps 15 \
    --rollout.engine transformers --cluster.placement colocated
part "models of the next scripts" 100 python3 -m benchmarks.first_light.inputs "$KEPT/models" "${SHAPES[@]}"
finish
