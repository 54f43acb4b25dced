"""Measure one trainer rank, the most useful rows first: ``python -m benchmarks.first_light.trainer --models DIR``.

The first row's process also profiles a step and moves its state to host memory and back.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from backends.megatron.trainer import MegatronTrainer
from benchmarks.trainer.batch import group_pack, pack_of_one
from benchmarks.trainer.jobs import ceiling, dtype, measured_on, run_config, step_packs, workload
from benchmarks.trainer.measure import SideError, in_process
from benchmarks.trainer.shapes import SHAPES, write_checkpoint
from benchmarks.trainer.sides import BackendSide, Side
from benchmarks.trainer.table import Row, render
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory
from slime_like.weights.checksums import tensor_checksums

_REPEATS, _ROW_S, _KERNELS = 3, 90.0, 15


@dataclass(frozen=True, slots=True)
class _Case:
    """One row.

    Attributes:
        packs: makes the step's packs from the model's dimensions.
        named: what is special about the row, for the table.
        settings: additional settings of the trainer.
    """

    shape: str
    side: str
    packs: Callable[[ModelDimensions], list[PackedTrajectory]]
    budget: int
    recompute: str = "none"
    named: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    afterwards: Callable[[Side], object] | None = None


def main() -> None:
    """Measure all rows; if one fails or does not fit, the others still run and the exit code is 1."""
    options = _parser().parse_args()
    end = time.monotonic() + options.seconds
    products = in_process(ceiling, None)
    assert products is not None
    print(f"figures: ceiling {products / 1e12:.3g} TFLOP/s", flush=True)
    rows: list[Row] = []
    for case in _cases(*options.shapes):
        if (left := end - time.monotonic()) < options.least_seconds:
            print(f"figures: no time left for {case.shape}, {case.side}, {case.named}")
            continue
        rows.append(_row(case, options.models, min(left, _ROW_S if torch.cuda.is_available() else left)))
        print(rows[-1].summary, flush=True)
        options.result.write_text(render(rows, products) + "\n", encoding="utf-8")
    figures = [row.figures for row in rows if row.figures is not None]
    print(f"figures: {len(figures)} of {len(rows)} rows measured")
    if any(row.failed for row in rows) or not figures:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="where checkpoints are made, or already are")
    parser.add_argument("--shapes", nargs=4, choices=SHAPES, required=True, help="large, tensor shard, small, experts")
    parser.add_argument("--result", type=Path, required=True, help="the table's file")
    parser.add_argument("--seconds", type=float, required=True, help="for all rows")
    parser.add_argument("--least-seconds", type=float, default=25.0, help="no row starts with less")
    return parser


def _cases(large: str, shard: str, small: str, moe: str) -> Iterator[_Case]:
    tokens, prompt = (8192, 4096) if torch.cuda.is_available() else (96, 64)
    full = partial(step_packs, tokens=tokens, count=2)
    yield _Case(large, "megatron", full, tokens, named="head as by default", afterwards=_profile_and_move)
    yield _Case(shard, "megatron", full, tokens)
    yield _Case(moe, "megatron", full, tokens)
    yield _Case(small, "megatron", full, tokens)
    yield _Case(small, "fsdp", full, tokens)
    for shared in (False, True):
        group = partial(group_pack, prompt=prompt, response=prompt // 8, shared=shared)
        named = f"8 answers to {prompt:,} tokens, {'shared' if shared else 'copied'}"
        sharing = {"share_prefixes": "prompts" if shared else False}
        yield _Case(small, "megatron", group, 9 * prompt, "full", named, sharing)
    yield _Case(large, "megatron", partial(pack_of_one, tokens=4 * tokens), 4 * tokens, "full", "one sequence")
    yield _Case(small, "hf-padded", full, tokens)
    yield _Case(large, "megatron", full, tokens, named="head 2,048", settings={"head_chunk_tokens": 2048})


def _row(case: _Case, models: Path, seconds: float) -> Row:
    model = models / case.shape
    if not (model / "tokenizer.json").exists():  # written last
        write_checkpoint(case.shape, model, dtype())
    dimensions = ModelDimensions.from_checkpoint(model)
    packs = case.packs(dimensions)
    work = workload(case.shape, dimensions, packs, case.budget)
    for recompute in dict.fromkeys((case.recompute, "full")):
        named = ", ".join(filter(None, (recompute, case.named)))
        config = run_config(model, work, case.side, recompute, **case.settings)
        try:
            found = in_process(measured_on, packs, case.side, config, _REPEATS, case.afterwards, timeout_s=seconds)
        except SideError as error:
            return Row(work, case.side, named, None, failed=str(error))
        if found is not None:
            return Row(work, case.side, named, *found)
    return Row(work, case.side, named, None)


def _profile_and_move(side: Side) -> None:
    assert isinstance(side, BackendSide)
    _profile(side)
    _hash(side)
    if side.device.type == "cuda":
        _move(side)


def _profile(side: BackendSide) -> None:
    """Print the slowest kernels of one step, and the share of its time without any kernel."""
    on_cuda = side.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as recorded:
        side.forward_backward()
        side.update()
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    device = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    found = [event for event in recorded.key_averages() if _runs_on(device, event)]
    top = sorted(found, key=lambda event: getattr(event, key), reverse=True)
    total = sum(getattr(event, key) for event in top)
    lines = ["| kernel | calls | ms | share |", "|---|---:|---:|---:|"]
    for event in top[:_KERNELS]:
        took = getattr(event, key)
        name = event.key[:90].replace("|", "/")
        lines.append(f"| {name} | {event.count} | {took / 1e3:.1f} | {took / total:.1%} |")
    Path(os.environ["OUT"], "profile.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if on_cuda:
        kernels = sorted(
            (event.time_range.start, event.time_range.end) for event in recorded.events() if _runs_on(device, event)
        )
        span, busy = _span_and_busy(kernels)
        idle = 1 - busy / span
        print(f"figures: profiled step: {span / 1e3:.0f} ms, {len(kernels):,} kernels, device idle {idle:.1%}")


def _runs_on(device: torch.autograd.DeviceType, event: Any) -> bool:
    """Return whether an event is a kernel: operators include their kernels' times, and annotations cover others."""
    return event.device_type == device and not event.is_user_annotation


def _span_and_busy(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the time from first start to last end, and the part in any interval; they are sorted by start."""
    busy, end = 0.0, intervals[0][0]
    for start, stop in intervals:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return end - intervals[0][0], busy


def _weights(side: BackendSide) -> list[Tensor]:
    assert isinstance(side.trainer, MegatronTrainer)
    return [parameter.detach() for chunk in side.trainer.chunks for parameter in chunk.parameters()]


def _hash(side: BackendSide) -> None:
    weights = _weights(side)
    nbytes = sum(weight.nbytes for weight in weights)
    seconds = min(_seconds(lambda: tensor_checksums(weights)) for _ in range(3))
    print(f"figures: hashing weights {nbytes / seconds / 1e9:.1f} GB/s")


def _move(side: BackendSide) -> None:
    for number in ("first", "second"):
        held = torch.cuda.memory_allocated()
        away = _seconds(side.trainer.offload)
        nbytes = held - torch.cuda.memory_allocated()
        back = _seconds(side.trainer.onload)
        print(
            f"figures: {number} offload of {nbytes / 1e9:.1f} GB {away:.2f} s ({nbytes / away / 1e9:.1f} GB/s), "
            f"onload {back:.2f} s ({nbytes / back / 1e9:.1f} GB/s)",
            flush=True,
        )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
