"""The command ``python -m benchmarks.trainer``: measure a trainer's step on one device.

Megatron, FSDP, and Hugging Face's model with torch's attention train on the same packs or on padded batches of the same
sequences, each in a separate process. On CUDA the models are Qwen3 0.6B, 1.7B and 4B in bfloat16, with 8k or 32k
tokens per pack. On a CPU it is the tiny Qwen3 in float32, with a minibatch of the quickstart's shape.
"""

import argparse
import datetime
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.step.machine import processor_name
from benchmarks.trainer.jobs import (
    BACKENDS,
    HUGGING_FACE,
    ceiling,
    dtype,
    measured,
    run_config,
    step_packs,
    workload,
)
from benchmarks.trainer.measure import SideError, in_process
from benchmarks.trainer.shapes import SHAPES, write_checkpoint
from benchmarks.trainer.table import Row, Workload, render
from slime_like.models.dimensions import ModelDimensions

RECOMPUTE = ("none", "full")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all sides; if one fails, the others still run and the exit code is 1.

    The report is written after every row, so that a time limit keeps finished rows.
    """
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="slime-like-trainer-") as directory:
        products = in_process(ceiling, options.threads)
        if products is None:
            sys.exit("error: matrix products did not fit the device's memory; is somebody else using it?")
        head = _head(options, arguments, products)
        print(head, flush=True)
        rows = []
        for row in _rows(options, Path(directory)):
            rows.append(row)
            print(row.summary, file=sys.stderr, flush=True)
            if options.result:
                options.result.write_text(f"{head}\n\n{render(rows, products)}\n", encoding="utf-8")
    print(f"\n{render(rows, products)}")
    if any(row.failed for row in rows):
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    shapes = ["0.6b", "1.7b", "4b"] if on_cuda else ["tiny"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes, help="default: %(default)s")
    parser.add_argument(
        "--tokens",
        type=_positive,
        nargs="+",
        default=[8192, 32768] if on_cuda else None,
        help="of a full pack; without it a step is a minibatch of the quickstart's (default: %(default)s)",
    )
    parser.add_argument("--micro-batches", type=_positive, default=4, help="full packs a step (default: %(default)s)")
    sides = [*BACKENDS, *HUGGING_FACE]
    parser.add_argument("--backend", nargs="+", choices=sides, default=sides, help="default: %(default)s")
    parser.add_argument("--repeats", type=_positive, default=10, help="steps measured (default: %(default)s)")
    parser.add_argument("--threads", type=_positive, help="of each process; all cores if left out")
    parser.add_argument(
        "--recompute",
        nargs="+",
        choices=RECOMPUTE,
        default=list(RECOMPUTE),
        help="of layers in backward, tried in this order: the first that fits the memory is measured "
        "(default: %(default)s)",
    )
    parser.add_argument("--result", type=Path, help="also write the report to this file")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _rows(options: argparse.Namespace, directory: Path) -> Iterator[Row]:
    for shape in options.shapes:
        model = directory / shape
        write_checkpoint(shape, model, dtype())
        dimensions = ModelDimensions.from_checkpoint(model)
        for tokens in options.tokens or [None]:
            packs = step_packs(dimensions, tokens, options.micro_batches)
            work = workload(shape, dimensions, packs, tokens)
            for side in options.backend:
                yield _row(side, work, model, tokens, options)


def _row(side: str, work: Workload, model: Path, tokens: int | None, options: argparse.Namespace) -> Row:
    for recompute in options.recompute:
        config = run_config(model, work, side, recompute, cpu_threads=options.threads)
        try:
            found = in_process(measured, side, config, tokens, options.micro_batches, options.repeats)
            if found is not None:
                return Row(work, side, recompute, *found)
        except SideError as error:
            return Row(work, side, recompute, None, failed=str(error))
    return Row(work, side, recompute, None)


def _head(options: argparse.Namespace, arguments: Sequence[str] | None, products: float) -> str:
    command = shlex.join(["python", "-m", "benchmarks.trainer", *(sys.argv[1:] if arguments is None else arguments)])
    cores = options.threads or len(os.sched_getaffinity(0))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cores} threads of {processor_name()}"
    attention = [name for name in ("transformer_engine", "flash_attn") if find_spec(name)]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers"))
    return (
        f"`{command}`, {datetime.date.today()}, {device}, {packages}, {' and '.join(attention) or 'torch alone'} for "
        f"attention. Matrix products: {products / 1e12:.2f} TFLOP/s."
    )


if __name__ == "__main__":
    main()
