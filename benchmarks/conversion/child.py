"""Convert once in a separate process; print seconds without imports, and memory, as JSON."""

import json
import resource
import sys
import time
from pathlib import Path

from benchmarks.conversion.memory import AnonymousPeak
from slime_like.config import RunConfig
from slime_like.conversion.convert import converter_of, reported
from slime_like.interfaces.conversion import ConversionOptions


def main(what: str, source: str, output: str, tensor: int, pipeline: int, workers: int) -> None:
    options = ConversionOptions("auto", 250_000_000, workers, False)
    parallel = {"tensor": tensor, "pipeline": pipeline} if what == "to-megatron" else {}
    path = Path(source) if what == "to-megatron" else Path(source) / "model"
    config = RunConfig(
        run_dir=Path(output), model={"path": path}, trainer={"parallel": parallel}, logging={"progress": "off"}
    )
    converter = converter_of(config.model, config.trainer)
    memory = AnonymousPeak()
    memory.start()
    started = time.monotonic()
    with reported(config.logging, "MiB converted") as report:
        if what == "to-megatron":
            converter.to_checkpoint(Path(output), options, report)
        else:
            converter.to_hugging_face(Path(source) / "trainer", Path(output), options, report)
    seconds = time.monotonic() - started
    memory.stop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "own": memory.peak - memory.first, "start": memory.first, "rss": peak}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *(int(number) for number in sys.argv[4:]))
