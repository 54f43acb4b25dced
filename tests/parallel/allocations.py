"""What the CPU's allocator is asked for while something runs, and by what."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

OTHER = "other"

_COPIES_OF_GLOO = ("gloo:", "c10d::")
"""Ranges in which gloo copies what it sends; NCCL sends from the tensors themselves."""


@dataclass(frozen=True)
class Allocated:
    """In bytes, without gloo's copies: the highest moment by label, above what was there before; what is left."""

    peak: Counter[str]
    left: int


def allocated_by(run: Callable[[], Any], labels: Mapping[str, str] | None = None) -> Allocated:
    """Follow ``run``.

    Args:
        labels: a prefix of a profiler's range (operator, autograd function, ``record_function``) to the label of what
            is allocated inside it. The outermost such range counts; without one it is ``OTHER``.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    result: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    live: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    known: dict[int, str | None] = {}
    for event in sorted(_allocations(result.experimental_event_tree()), key=lambda event: event.start_time_ns):
        found = event.typed[1]
        if found.alloc_size > 0:
            known[found.ptr] = label = _label(event, labels or {})
        else:
            label = known.pop(found.ptr, OTHER)
        if label is not None:
            live[label] += found.alloc_size
        if live.total() > peak.total():
            peak = live.copy()
    return Allocated(peak, live.total())


def _allocations(events: list[Any]) -> Iterator[Any]:
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def _label(event: Any, labels: Mapping[str, str]) -> str | None:
    """``None`` for gloo's copies."""
    found = OTHER
    while (event := event.parent) is not None:
        if event.name.startswith(_COPIES_OF_GLOO):
            return None
        found = next((label for prefix, label in labels.items() if event.name.startswith(prefix)), found)
    return found
