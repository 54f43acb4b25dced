"""Trainer ranks and engine workers that share a device."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime_like.errors import WeightSyncError
from slime_like.weights.transports.device_memory import gpu_uuid


@dataclass(frozen=True, slots=True)
class Place:
    """Device of a rank or worker: its host's name, and a GPU's UUID or a CPU slot's number."""

    node: str
    device: str

    @classmethod
    def of_this_process(cls, slot: int) -> Place:
        """Return the current GPU. On a CPU, ranks are numbered slots, and a colocated worker uses one rank's slot."""
        device = gpu_uuid(torch.cuda.current_device()) if torch.cuda.is_available() else f"CPU slot {slot}"
        return cls(socket.gethostname(), device)

    def __str__(self) -> str:
        return f"{self.device} of {self.node}"


def pair(ranks: Sequence[Place], workers: Sequence[Place]) -> list[int]:
    """Return the trainer rank on each worker's device.

    Raises:
        WeightSyncError: a worker's device has no rank, or a device has two.
    """
    on: dict[Place, int] = {}
    for rank, place in enumerate(ranks):
        if place in on:
            raise _unpaired(f"trainer ranks {on[place]} and {rank} are both on {place}")
        on[place] = rank
    if alone := [place for place in workers if place not in on]:
        raise _unpaired(f"no trainer rank is on {', '.join(map(str, alone))}, where an engine's worker is")
    return [on[place] for place in workers]


def _unpaired(problem: str) -> WeightSyncError:
    remedy = "use sync.transport: shared_memory, or gloo between hosts"
    return WeightSyncError(problem, code="unpaired", who="weight sync between colocated processes", remedy=remedy)
