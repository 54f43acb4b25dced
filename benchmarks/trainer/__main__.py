"""The command ``python -m benchmarks.trainer``: measure a trainer's step on one device.

Megatron, FSDP, and Hugging Face's model with torch's attention train on the same packs or on padded batches of the same
sequences, each in a separate process. On CUDA the models are Qwen3 0.6B, 1.7B and 4B in bfloat16, with 8k or 32k
tokens per pack. On a CPU it is the tiny Qwen3 in float32, with a minibatch of the quickstart's shape.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.report import heading, parser
from benchmarks.trainer.jobs import BACKENDS, HUGGING_FACE, ceiling, dtype, measured, run_config, step_packs, workload
from benchmarks.trainer.measure import SideError, in_process
from benchmarks.trainer.shapes import SHAPES, write_checkpoint
from benchmarks.trainer.table import Row, Workload, render
from slime_like.models.dimensions import ModelDimensions

RECOMPUTE = ["none", "full"]
_ROUNDING = 1.05
"""Bound on the ratio of gradient norms of one step, in bfloat16."""


def main() -> None:
    """Measure all sides; if one fails, the others still run and the exit code is 1.

    The report is written after every row, so that a time limit keeps finished rows.
    """
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="slime-like-trainer-") as directory:
        products = in_process(ceiling, options.threads)
        if products is None:
            sys.exit("error: matrix products did not fit the device's memory; is somebody else using it?")
        head = f"{heading()} {_device(options.threads)} Matrix products: {products / 1e12:.2f} TFLOP/s."
        print(head, flush=True)
        rows = []
        for row in _rows(options, Path(directory)):
            rows.append(row)
            print(row.summary, file=sys.stderr, flush=True)
            if options.result:
                options.result.write_text(f"{head}\n\n{render(rows, products)}\n", encoding="utf-8")
    print(f"\n{render(rows, products)}")
    for work in {row.workload for row in rows}:
        norms = [row.figures.grad_norm for row in rows if row.workload == work and row.figures is not None]
        if norms and max(norms) > _ROUNDING * min(norms):
            sys.exit(f"error: {work.shape}: gradient norms {norms} differ, so the sides did not compute the same step")
    if any(row.failed for row in rows):
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    on_cuda, options = torch.cuda.is_available(), parser(__doc__)
    add, sides = options.add_argument, [*BACKENDS, *HUGGING_FACE]
    add("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1.7b", "4b"] if on_cuda else ["tiny"])
    tokens = [8192, 32768] if on_cuda else None
    add(
        "--tokens", type=_positive, nargs="+", default=tokens, help="of a full pack; None is the quickstart's minibatch"
    )
    add("--micro-batches", type=_positive, default=4, help="full packs a step")
    add("--backend", nargs="+", choices=sides, default=sides)
    add("--repeats", type=_positive, default=10, help="steps measured")
    add("--threads", type=_positive, help="of each process; all cores if left out")
    recompute = "of layers in backward, tried in this order: the first that fits the memory is measured"
    add("--recompute", nargs="+", choices=RECOMPUTE, default=RECOMPUTE, help=recompute)
    return options


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


def _device(threads: int | None) -> str:
    attention = " and ".join(name for name in ("transformer_engine", "flash_attn") if find_spec(name))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{threads or 'all'} threads"
    return f"{device}, {attention or 'torch alone'} for attention."


if __name__ == "__main__":
    main()
