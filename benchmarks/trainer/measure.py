"""Measure times and memory of one side in a separate process."""

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.trainer.sides import Side
from slime_like.errors import TrainerError

_WARM_UP = 2
_TIMEOUT_S = 1800.0
_IMPORTED = [
    "backends.fsdp.trainer",
    "backends.megatron.trainer",
    "benchmarks.trainer.jobs",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]
"""Modules that every process of the benchmark needs."""
_Result = TypeVar("_Result")


class SideError(Exception):
    """A process that failed; its traceback is on standard error."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the steps after the first two, in seconds.

    Attributes:
        start_s: seconds until the weights are loaded.
        score_s, forward_backward_s, update_s: seconds of the parts of a step.
        processor_s: CPU time of forward, backward and update.
        peak_bytes: peak memory of the device, or on a CPU of the process's resident set.
        grad_norm: norm of the first step before clipping; equal for sides that compute the same.
    """

    start_s: float
    score_s: float
    forward_backward_s: float
    update_s: float
    processor_s: float
    peak_bytes: int
    grad_norm: float

    @property
    def step_s(self) -> float:
        """Seconds of forward, backward and update."""
        return self.forward_backward_s + self.update_s


def measure(make: Callable[[], Side], repeats: int, afterwards: Callable[[Side], object] | None = None) -> Figures:
    """Start a side, run ``repeats`` steps after two warm-up steps, then call ``afterwards`` with the side."""
    started = time.perf_counter()
    side = make()
    start_s = time.perf_counter() - started
    parts: dict[str, list[float]] = {"score": [], "forward_backward": [], "update": [], "processor": []}
    norms = []
    for _ in range(_WARM_UP + repeats):
        parts["score"].append(_seconds(side, side.score))
        used = time.process_time()
        parts["forward_backward"].append(_seconds(side, side.forward_backward))
        parts["update"].append(_seconds(side, lambda: norms.append(side.update())))
        parts["processor"].append(time.process_time() - used)
    peak = _peak_bytes(side.device)
    if afterwards is not None:
        afterwards(side)
    side.close()
    middle = {name: statistics.median(values[_WARM_UP:]) for name, values in parts.items()}
    return Figures(
        start_s, middle["score"], middle["forward_backward"], middle["update"], middle["processor"], peak, norms[0]
    )


def _seconds(side: Side, part: Callable[[], object]) -> float:
    _finish(side.device)
    started = time.perf_counter()
    part()
    _finish(side.device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_process(function: Callable[..., _Result], *arguments: Any, timeout_s: float = _TIMEOUT_S) -> _Result | None:
    """Return the result of ``function`` in a new process, or ``None`` if the device ran out of memory.

    Processes are forked from a server that has imported everything and has not initialized CUDA.

    Raises:
        SideError: the process failed for another reason, or did not end in time.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise asking for devices initializes CUDA
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    results = context.SimpleQueue()
    process = context.Process(target=_deliver, args=(results, function, *arguments), daemon=True)
    process.start()
    process.join(timeout_s)
    if process.exitcode != 0:
        process.kill()
        raise SideError("did not end in time" if process.exitcode is None else f"ended with {process.exitcode}")
    answer: _Result | None = results.get()
    return answer


def _deliver(results: Any, function: Callable[..., object], *arguments: Any) -> None:
    try:
        results.put(function(*arguments))
    except (RuntimeError, TrainerError) as error:
        if not _is_out_of_memory(error):
            raise
        results.put(None)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error or a cause of it is out of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False
