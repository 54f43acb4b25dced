"""Load one trainer rank's part of a Hugging Face directory, as training does; print JSON."""

import json
import sys
import time
from pathlib import Path

import torch

from backends.megatron import conversion, parallel
from backends.megatron.cpu_runtime import megatron_runtime
from backends.megatron.model import build_chunks
from benchmarks.conversion.memory import AnonymousPeak
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions


def main(rank: int, port: int, model: Path, tensor: int, pipeline: int) -> None:
    torch.set_num_threads(1)
    layout = {"tensor": tensor, "pipeline": pipeline}
    config = RunConfig(run_dir=model, model={"path": model}, trainer={"parallel": layout})
    dimensions = ModelDimensions.from_checkpoint(model)
    with megatron_runtime():
        parallel.initialize(config.trainer, RankPlacement(rank, tensor * pipeline, 0, "127.0.0.1", port), config.seed)
        memory = AnonymousPeak()
        memory.start()
        started = time.monotonic()
        chunks = build_chunks(config, dimensions)
        conversion.load_hf_weights(chunks, model, dimensions)
        seconds = time.monotonic() - started
        memory.stop()
        sizes = [parameter.nbytes for chunk in chunks for parameter in chunk.parameters()]
        parallel.leave()
    measured = {"seconds": seconds, "own": memory.peak - memory.first, "shard": sum(sizes), "largest": max(sizes)}
    print(json.dumps(measured))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
