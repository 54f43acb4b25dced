"""Transports by name: their reach, the choice of ``auto``, senders, and receivers for several senders."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from slime_like.config import ClusterConfig, SyncConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import BucketMetadata
from slime_like.plugins.options import load_option
from slime_like.weights.transport import Receiver, Sender, TransportSettings
from slime_like.weights.transports.names import TRANSPORTS, Libraries

AUTO, COLOCATED = "auto", "colocated"
_DELTA, _SENDERS, _SENDER = "delta", "senders", "sender"


def transport_of(
    sync: SyncConfig, cluster: ClusterConfig, on_cuda: bool, num_hosts: int, trainers: Libraries, engines: Libraries
) -> str:
    """Resolve ``sync.transport`` to a transport.

    Args:
        on_cuda: trainers and engines compute on GPUs.
        num_hosts: hosts in use.
        trainers, engines: library versions on either side.

    Raises:
        ConfigError: the chosen transport can't connect them.
    """
    chosen, by_default = sync.transport, ("nccl", COLOCATED, "shared_memory", "gloo")
    problems = {name: _problem(name, sync, cluster, on_cuda, num_hosts) for name in by_default}
    shared = {"nccl": trainers.shares_nccl(engines), COLOCATED: not on_cuda or trainers.torch == engines.torch}
    for name in (name for name, is_shared in shared.items() if not is_shared and problems[name] is None):
        library = "NCCL" if name == "nccl" else "torch"
        problems[name] = f"needs one version of {library}: trainers have {trainers}, rollout.python has {engines}"
    # Without GPUs, one segment serves all workers of a host, and gloo can send only the changes.
    best = next(name for name in by_default if problems[name] is None and (on_cuda or name != COLOCATED))
    if problem := problems.get(chosen):
        raise ConfigError(f"sync.transport={chosen} {problem}; use {best}, or auto", code="out-of-reach")
    return best if chosen == AUTO else chosen


def _problem(name: str, sync: SyncConfig, cluster: ClusterConfig, on_cuda: bool, num_hosts: int) -> str | None:
    """Explain why this transport can't reach every engine process from every trainer rank; ``None`` if it can."""
    shared = cluster.placement == "colocated"
    if name == "shared_memory" and num_hosts > 1:
        return f"reaches one host, but trainers and engines are on {num_hosts}"
    if name == "nccl" and not on_cuda:
        return "needs GPUs, but there are none"
    if name == "nccl" and shared:
        return "needs a separate device for every process, but engines share the trainers' (cluster.placement)"
    if name == COLOCATED and not shared:
        return "needs engines on the trainers' devices: cluster.placement=colocated"
    if name == COLOCATED and sync.delta == "always":
        return "sends whole tensors, but sync.delta=always asks for changes"
    return None


def use_delta(setting: str, transport: str, dtype: str) -> bool:
    """Return whether to send only changes.

    With "auto": if bytes cross a network or a disk and weights have 16 bits, because a step leaves most of them
    unchanged. Within one host, finding the changes takes longer than copying everything.
    """
    if setting != AUTO:
        return setting == "always"
    return transport in ("gloo", "directory") and dtype in ("bfloat16", "float16")


def open_sender(name: str, session: str, settings: TransportSettings = TransportSettings()) -> Sender:  # noqa: B008
    """Open a sender of transport ``name``.

    Args:
        session: unique across all runs on this host. It names everything the transport creates, so a dead process's
            leftovers can't be confused with a live one's.
        settings: where it listens or writes, and how long it waits.
    """
    sender: Sender = _class(name, "Sender")(name, session, settings)
    return load_option("delta-sender")(sender) if settings.delta else sender


def join_rendezvous(rendezvous: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the rendezvous of a session's senders into one for ``open_receiver``. Equal ones are merged."""
    different: list[Mapping[str, Any]] = []
    for one in rendezvous:
        if one not in different:
            different.append(one)
    return dict(different[0]) if len(different) == 1 else {_SENDERS: [dict(one) for one in different]}


def join_buckets(buckets: Sequence[BucketMetadata | None]) -> list[BucketMetadata]:
    """Return the sent buckets without gaps. A bucket held by all ranks appears once, with the memory of each."""
    sent = [bucket for bucket in buckets if bucket is not None]
    held = [bucket for bucket in sent if bucket.transport == COLOCATED]
    if not held:
        return sent
    whole = next(bucket for bucket in held if bucket.entries)
    parts = [part for bucket in held for part in bucket.location["held"]]
    return [replace(whole, location={**whole.location, "held": sorted(parts, key=lambda part: part["rank"])})]


def for_engine(rendezvous: Mapping[str, Any], first_rank: int) -> dict[str, Any]:
    """Return one engine's rendezvous. If colocated, its first worker uses trainer rank ``first_rank``'s device."""
    return {**rendezvous, "first_rank": first_rank}


def open_receiver(name: str, rendezvous: Mapping[str, Any], worker: int = 0) -> Receiver:
    """Open a receiver of transport ``name`` that meets the sender, or all senders, of ``rendezvous``.

    Args:
        worker: number of this process among its engine's workers.
    """
    if _SENDERS in rendezvous and name != COLOCATED:
        return _ManyReceivers(name, rendezvous[_SENDERS])
    if _DELTA in rendezvous:
        receiver: Receiver = load_option("delta-receiver")(open_receiver(name, rendezvous[_DELTA]))
    else:
        receiver = _class(name, "Receiver")(name, rendezvous, worker)
    return receiver


class _ManyReceivers:
    """One receiver per sender. Each bucket names its sender."""

    def __init__(self, name: str, senders: Sequence[Mapping[str, Any]]) -> None:
        self._receivers = {str(one.get(_DELTA, one)[_SENDER]): open_receiver(name, one) for one in senders}

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        return self._receivers[metadata.location[_SENDER]].receive(metadata)

    def rest(self) -> None:
        for receiver in self._receivers.values():
            receiver.rest()

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


def _class(name: str, side: str) -> Any:
    module, prefix = TRANSPORTS[name]
    return getattr(importlib.import_module(f"slime_like.weights.transports.{module}"), prefix + side)
