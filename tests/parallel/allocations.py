"""Memory that code requests from the CPU's allocator, by label."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

OTHER = "other"

_COPIES_OF_GLOO = ("gloo:", "c10d::")
"""Ranges in which gloo copies messages. NCCL sends directly from tensors."""

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
"""Attention and its backward. Their workspaces depend on the processor: with AMX they have packed keys and values."""


@dataclass(frozen=True)
class Allocated:
    """Peak by label above the memory before, and the rest afterwards, in bytes.

    Copies by gloo and workspaces of the CPU's attention don't count.
    """

    peak: Counter[str]
    left: int


def allocated_by(run: Callable[[], Any], labels: Mapping[str, str] | None = None) -> Allocated:
    """Profile ``run``.

    Args:
        labels: maps prefixes of profiler ranges (operators, autograd functions, ``record_function``) to labels of
            memory allocated inside. The outermost range counts; without one the label is ``OTHER``.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    result: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    live: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    known: dict[int, str | None] = {}
    events = sorted(_allocations(result.experimental_event_tree()), key=lambda event: event.start_time_ns)
    workspaces = _workspaces(events)
    for event in events:
        found = event.typed[1]
        if found.alloc_size > 0:
            known[found.ptr] = label = None if id(event) in workspaces else _label(event, labels or {})
        else:
            label = known.pop(found.ptr, OTHER)
        if label is not None:
            live[label] += found.alloc_size
        if live.total() > peak.total():
            peak = live.copy()
    return Allocated(peak, live.total())


def _allocations(events: list[Any]) -> Iterator[Any]:
    left = list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.typed[0] == _EventType.Allocation:
            yield event


def _workspaces(events: list[Any]) -> set[int]:
    """Return the ids of allocations, among ``events`` in order of time, that one call of attention makes and frees."""
    found: set[int] = set()
    made: dict[int, Any] = {}
    for event in events:
        allocation = event.typed[1]
        if allocation.alloc_size > 0:
            made[allocation.ptr] = event
        elif (allocated := made.pop(allocation.ptr, None)) is not None:
            call = _call_of_attention(allocated)
            if call is not None and call == _call_of_attention(event):
                found.add(id(allocated))
    return found


def _call_of_attention(event: Any) -> int | None:
    """Return the start time of the attention call that contains ``event``, or ``None``."""
    while (event := event.parent) is not None:
        if event.name.startswith(_ATTENTION):
            return int(event.start_time_ns)
    return None


def _label(event: Any, labels: Mapping[str, str]) -> str | None:
    """Return an allocation's label, or ``None`` for copies by gloo."""
    found = OTHER
    while (event := event.parent) is not None:
        if event.name.startswith(_COPIES_OF_GLOO):
            return None
        found = next((label for prefix, label in labels.items() if event.name.startswith(prefix)), found)
    return found
