"""Activations that a pipeline stage keeps at the same time, under Megatron's schedules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

WINDOWS_OF_STAGES = 4
"""Micro-batches in a window, in pipeline sizes: enough for the largest number in flight."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Memory of one chunk's pass over one micro-batch, in bytes on top of what was there before.

    Attributes:
        saved: kept from forward to backward.
        forward, backward: peak during each; backward's includes its saved activations.
        head_forward, head_backward: the head's part of these peaks.
    """

    saved: int
    forward: int
    backward: int
    head_forward: int = 0
    head_backward: int = 0


@dataclass(frozen=True, slots=True)
class WindowPeak:
    """The peak of a window: total bytes, the head's part of them, and micro-batches with live activations."""

    nbytes: int
    head: int
    in_flight: int


def schedule(stage: int, stages: int, chunks: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yield (pass, chunk) in the order of ``stage``: 1F1B, interleaved if a stage has several chunks.

    Source: Megatron-core's ``pipeline_parallel.schedules`` (Narayanan et al., arXiv:2104.04473, section 2.2).
    """
    micro_batches = WINDOWS_OF_STAGES * stages
    total = micro_batches * chunks
    after = stages - stage - 1
    warmup = min(after if chunks == 1 else after * 2 + (chunks - 1) * stages, total)
    for step in range(total + warmup):
        if step < total:
            yield "forward", _chunk(step, stages, chunks)
        if step >= warmup:
            yield "backward", chunks - 1 - _chunk(step - warmup, stages, chunks)


def _chunk(step: int, stages: int, chunks: int) -> int:
    """Return a step's chunk. A stage runs each chunk for as many micro-batches as there are stages."""
    return step % (stages * chunks) // stages


def window_peak(stage: int, stages: int, passes: Sequence[PassMemory]) -> WindowPeak:
    """Return the peak of a window of equal micro-batches; ``passes`` has one entry per chunk of the stage."""
    peak, live, under_way = WindowPeak(0, 0, 0), 0, 0
    for direction, chunk in schedule(stage, stages, len(passes)):
        chunk_pass = passes[chunk]
        if direction == "forward":
            under_way += 1
            moment = WindowPeak(live + chunk_pass.forward, chunk_pass.head_forward, under_way)
            live += chunk_pass.saved
        else:
            live -= chunk_pass.saved
            moment = WindowPeak(live + chunk_pass.backward, chunk_pass.head_backward, under_way)
            under_way -= 1
        peak = max(peak, moment, key=lambda found: found.nbytes)
    return peak
