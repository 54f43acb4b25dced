"""Exact comparison of two checkpoints: names, types, shapes and values."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from slime_like.interfaces.conversion import TensorSource
from slime_like.system.threads import Tracker, run_jobs
from slime_like.weights.checksums import as_bytes

_AT_ONCE = 1 << 22
"""Number of elements subtracted at a time."""


class Difference(NamedTuple):
    """One differing tensor."""

    name: str
    how: str


def compare_sources(
    a: TensorSource, b: TensorSource, workers: int, report: Callable[[int, int], None]
) -> list[Difference]:
    """List the differences by name. Values are compared if type and shape agree.

    Each worker holds one parameter of both sides in memory. ``report`` receives the bytes done and the bytes to do.
    Raises ``CheckpointError`` if a checkpoint is damaged.
    """
    differences = [Difference(name, "only in A") for name in a.tensors.keys() - b.tensors.keys()]
    differences += [Difference(name, "only in B") for name in b.tensors.keys() - a.tensors.keys()]
    alike = set()
    for name in a.tensors.keys() & b.tensors.keys():
        one, other = a.tensors[name], b.tensors[name]
        if one.shape != other.shape:
            differences.append(Difference(name, f"shape {list(one.shape)} in A, {list(other.shape)} in B"))
        elif one.dtype != other.dtype:
            differences.append(Difference(name, f"type {one.dtype} in A, {other.dtype} in B"))
        else:
            alike.add(name)
    # Tensors that one side reads together are compared together.
    groups = a.groups if max(map(len, a.groups), default=0) > 1 else b.groups
    jobs = [job for group in groups if (job := [name for name in group if name in alike])]
    total = sum(prod(a.tensors[name].shape) * getattr(torch, a.tensors[name].dtype).itemsize for name in alike)

    def compare(names: list[str], tracker: Tracker) -> list[Difference]:
        ours, theirs = a.read(names), b.read(names)
        found = [Difference(name, how) for name in names if (how := _values_differ(ours[name], theirs[name]))]
        tracker.advance(sum(ours[name].nbytes for name in names))
        return found

    run_jobs(jobs, compare, workers, differences.extend, lambda done: report(done, total))
    return sorted(differences)


def _values_differ(ours: Tensor, theirs: Tensor) -> str | None:
    if torch.equal(as_bytes(ours), as_bytes(theirs)):
        return None
    count, largest = 0, 0.0
    for one, other in zip(ours.flatten().split(_AT_ONCE), theirs.flatten().split(_AT_ONCE), strict=True):
        count += int((as_bytes(one).view(len(one), -1) != as_bytes(other).view(len(other), -1)).any(dim=1).sum())
        largest = max(largest, float((one.double() - other.double()).abs().nan_to_num(nan=torch.inf).max()))
    return f"values: {count} of {ours.numel()} differ, by at most {largest:.3g}"
