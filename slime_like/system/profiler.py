"""Traces of a process by torch's profiler, in the format that Perfetto and chrome://tracing read."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slime_like.system.spans import span

_MOST_EVENTS = 200_000
"""Allocations kept for the snapshot of CUDA's memory."""


class Profiler:
    """Recorder of a process's operators, kernels and named ranges, from ``start`` to ``write``.

    Args:
        memory: also record allocations, and on a GPU a snapshot for https://pytorch.org/memory_viz.
    """

    def __init__(self, memory: bool) -> None:
        on_cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
        # An engine decodes in other threads than the one that gets the call.
        threads: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=activities, profile_memory=memory, experimental_config=threads)
        self._snapshot = memory and on_cuda

    def start(self) -> None:
        if self._snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._profile.start()

    def write(self, path: Path) -> None:
        """Stop, and write ``path`` with the ending ``.json.gz``; the snapshot has the ending ``.pickle``."""
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(f"{path}.json.gz")
        if self._snapshot:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """Name a phase in traces of torch's profiler, for NVIDIA's Nsight, and in the run's timeline."""
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name), span("phases", name):
            yield
    finally:
        if on_cuda:
            torch.cuda.nvtx.range_pop()


_running: list[Profiler] = []
"""The profiler that runs in this process, if one does."""


def profile_process(path: str | None, memory: bool = False) -> None:
    """Start to record this process, or, with a ``path`` without its ending, stop and write the trace there."""
    if path is None:
        _running.append(Profiler(memory))
        _running[0].start()
    else:
        _running.pop().write(Path(path))
