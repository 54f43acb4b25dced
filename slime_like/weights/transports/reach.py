"""Reach of transports from trainers to engines, and the choice of ``auto``."""

from dataclasses import dataclass

from slime_like.config import RunConfig
from slime_like.errors import WeightSyncError
from slime_like.weights.transports.registry import AUTO, require_transport


@dataclass(frozen=True, slots=True)
class Situation:
    """Location of trainers and engines.

    Attributes:
        on_cuda: trainers and engines compute on GPUs.
        num_hosts: hosts in use.
        shared_devices: engines use the trainers' own devices, in turns.
        devices_are_visible: every engine's process sees the device of every trainer rank.
    """

    on_cuda: bool
    num_hosts: int
    shared_devices: bool
    devices_are_visible: bool


def transport_of(config: RunConfig, on_cuda: bool, num_hosts: int) -> str:
    """The run's weight transport on these devices. Raises ``WeightSyncError`` as ``choose_transport``."""
    shared, rollout = config.cluster.placement == "colocated", config.rollout
    one_engine = rollout.num_engines == 1 and rollout.tensor == config.trainer.parallel.world_size
    return choose_transport(config.sync.transport, Situation(on_cuda, num_hosts, shared, shared and one_engine))


def choose_transport(name: str, situation: Situation) -> str:
    """The transport that ``sync.transport`` stands for in this situation.

    Raises:
        WeightSyncError: it does not reach.
    """
    require_transport(name)
    chosen = _best(situation) if name == AUTO else name
    problem = _problem(chosen, situation)
    if problem:
        raise WeightSyncError(
            f"sync.transport={chosen} {problem}", code="out-of-reach", remedy=f"use {_best(situation)}, or auto"
        )
    return chosen


def use_delta(setting: str, transport: str, dtype: str) -> bool:
    """Return whether only changes are sent.

    Automatically where bytes cross a network or a disk, and weights are of 16 bits, most of which one step leaves
    as they are. Inside a host, finding the changes takes longer than copying everything.
    """
    if setting != AUTO:
        return setting == "always"
    return transport in ("gloo", "directory") and dtype in ("bfloat16", "float16")


def _best(situation: Situation) -> str:
    return next(name for name in ("nccl", "cuda_ipc", "shared_memory", "gloo") if not _problem(name, situation))


def _problem(name: str, situation: Situation) -> str | None:
    hosts = situation.num_hosts
    if name in ("shared_memory", "cuda_ipc") and hosts > 1:
        return f"reaches one host, but trainers and engines lie on {hosts}"
    if name in ("nccl", "cuda_ipc") and not situation.on_cuda:
        return "needs GPUs, and there are none"
    if name == "nccl" and situation.shared_devices:
        return "needs a separate device for every process, but engines share the trainers' (cluster.placement)"
    if name == "cuda_ipc" and not (situation.shared_devices and situation.devices_are_visible):
        return (
            "needs engines on the trainers' own devices: cluster.placement=colocated, and one engine whose "
            "rollout.tensor is the number of trainer ranks"
        )
    return None
