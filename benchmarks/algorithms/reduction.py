"""Compare ``sum_of_sample_mean`` with the split-and-loop form, eager and compiled, and nested tensors."""

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.algorithms.measure import Row, best_times, time_rows
from slime_like.algorithms import sum_of_sample_mean

COMPILE_LIMIT_S = 120.0
COUNTS: dict[int, dict[str, float]] = {10: {"sum_of_sample_mean": 1.0}, 100: {}, 1000: {"sum_of_sample_mean": 4.0}}
"""Maps numbers of responses to the least speeds, relative to the loop."""
LOOP, OURS = "split and loop", "sum_of_sample_mean"


def rows() -> list[Row]:
    """Measure 10, 100 and 1,000 responses of 256 to 1,023 tokens: forward, and forward with backward."""
    found = []
    for count, goals in COUNTS.items():
        x, lengths, masks = _samples(count)
        nested = torch.nested.as_nested_tensor(list(x.split(lengths)), layout=torch.jagged)
        nested_masks = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        forms: dict[str, Callable[[], object]] = {
            LOOP: lambda: _loop(x, lengths, masks),  # noqa: B023
            OURS: lambda: sum_of_sample_mean(x, lengths, masks),  # noqa: B023
            "nested, given flat tensors": lambda: _nested_from_flat(x, lengths, masks),  # noqa: B023
            "nested, made beforehand": lambda: _nested(nested, nested_masks),  # noqa: B023
        }
        times = best_times(forms)
        compiled = _compiled_ms(count)
        times["split and loop, compiled"] = compiled
        table = time_rows(f"sum of sample means, {count}", times, LOOP, goals)
        if compiled == float("inf"):
            table[-1] = Row(table[-1].case, table[-1].form, compiled, "ms", f"not compiled in {COMPILE_LIMIT_S:.0f} s")
        found += table
        x.requires_grad_()
        both = best_times(
            {LOOP: lambda: _loop(x, lengths, masks).backward(), OURS: lambda: sum_of_sample_mean(x, lengths, masks).backward()}  # noqa: B023, E501
        )  # fmt: skip
        found += time_rows(f"the same with backward, {count}", both, LOOP, goals)
    return found


def _samples(count: int) -> tuple[Tensor, list[int], list[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(256, 1024, (count,), generator=generator).tolist()
    masks = [torch.randint(0, 2, (n,), generator=generator).float() for n in lengths]
    return torch.randn(sum(lengths), generator=generator), lengths, masks


def _loop(x: Tensor, lengths: Sequence[int], masks: Sequence[Tensor]) -> Tensor:
    parts = zip(x.split(list(lengths)), masks, strict=True)
    return sum([(a * m).sum() / torch.clamp_min(m.sum(), 1) for a, m in parts], torch.zeros(()))


def _nested_from_flat(x: Tensor, lengths: Sequence[int], masks: Sequence[Tensor]) -> Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return _nested(
        torch.nested.nested_tensor_from_jagged(x, offsets),
        torch.nested.nested_tensor_from_jagged(torch.cat(list(masks)), offsets),
    )


def _nested(x: Any, masks: Any) -> Tensor:
    # Both have equal lengths but different symbolic ones, so give the values the same offsets.
    product = torch.nested.nested_tensor_from_jagged(x.values() * masks.values(), x.offsets())
    counts = torch.nested.nested_tensor_from_jagged(masks.values(), x.offsets())
    return (product.sum(dim=1) / counts.sum(dim=1).clamp_min(1)).sum()


def _compiled_ms(count: int) -> float:
    """Measure in a separate process: compiling unrolls the loop, which may take too long."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_time_compiled, args=(sender, count))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(COMPILE_LIMIT_S) else float("inf")
    finally:
        # The compiler's workers are in the process group that `_time_compiled` made.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cast(int, process.pid), signal.SIGKILL)
        process.kill()
        process.join()


def _time_compiled(sender: Connection, count: int) -> None:
    os.setsid()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    x, lengths, masks = _samples(count)
    compiled = torch.compile(_loop)
    sender.send(best_times({"compiled": lambda: compiled(x, lengths, masks)})["compiled"])
