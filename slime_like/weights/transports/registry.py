"""Transports by name, and the receiving side of several senders."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata
from slime_like.weights.delta.receiver import DeltaReceiver
from slime_like.weights.delta.sender import DeltaSender
from slime_like.weights.transport import Receiver, Sender, TransportSettings

AUTO = "auto"
_DELTA, _SENDERS, _SENDER = "delta", "senders", "sender"

# Modules are named, not imported: a transport may need libraries that only its own users have installed.
_TRANSPORTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "shared_memory": ("shared_memory", "SharedMemory"),
        "gloo": ("collective", "Collective"),
        "nccl": ("collective", "Collective"),
        "cuda_ipc": ("cuda_ipc", "CudaIpc"),
        "directory": ("directory", "Directory"),
    }
)
"""Module, and what the names of its sender's and receiver's classes begin with."""


def require_transport(name: str) -> None:
    """Raises ``WeightSyncError`` where ``sync.transport`` is not one."""
    if name not in _TRANSPORTS and name != AUTO:
        raise WeightSyncError(
            f"sync.transport={name} is unknown",
            code="unknown-transport",
            remedy=f"use {AUTO} or one of {', '.join(sorted(_TRANSPORTS))}",
        )


def open_sender(name: str, session: str, settings: TransportSettings = TransportSettings()) -> Sender:  # noqa: B008
    """A sender of transport ``name``.

    Args:
        session: unique over all runs on this host; names whatever the transport creates, so that leftovers of a
            dead process are distinct from those of a live one.
        settings: where it listens or writes, and how long it waits.
    """
    sender: Sender = _class(name, "Sender")(name, session, settings)
    return DeltaSender(sender) if settings.delta else sender


def join_rendezvous(rendezvous: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One rendezvous for all senders of a session, for ``open_receiver``; those that say the same are one."""
    different: list[Mapping[str, Any]] = []
    for one in rendezvous:
        if one not in different:
            different.append(one)
    if not different:
        raise WeightSyncError(
            "no trainer rank sends weights",
            code="no-sending-rank",
            remedy="report this, with the layout of trainer.parallel",
        )
    return dict(different[0]) if len(different) == 1 else {_SENDERS: [dict(one) for one in different]}


def open_receiver(name: str, rendezvous: Mapping[str, Any]) -> Receiver:
    """A receiver of transport ``name`` that meets the sender, or all senders, of ``rendezvous``."""
    if _SENDERS in rendezvous:
        return _ManyReceivers(name, rendezvous[_SENDERS])
    if _DELTA in rendezvous:
        return DeltaReceiver(open_receiver(name, rendezvous[_DELTA]))
    receiver: Receiver = _class(name, "Receiver")(name, rendezvous)
    return receiver


class _ManyReceivers:
    """One receiver per sender; a bucket says whose it is."""

    def __init__(self, name: str, senders: Sequence[Mapping[str, Any]]) -> None:
        self._receivers = {str(one.get(_DELTA, one)[_SENDER]): open_receiver(name, one) for one in senders}

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        sender = metadata.location.get(_SENDER)
        if sender not in self._receivers:
            raise WeightSyncError(
                f"a bucket of sender {sender}, which this engine has not connected to", code="foreign-bucket"
            )
        return self._receivers[sender].receive(metadata)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


def _class(name: str, side: str) -> Any:
    require_transport(name)
    if name == AUTO:
        raise WeightSyncError(
            f"sync.transport={AUTO} must be resolved first",
            code="unresolved-transport",
            remedy="see weights.transports.reach",
        )
    module, prefix = _TRANSPORTS[name]
    return getattr(importlib.import_module(f"slime_like.weights.transports.{module}"), prefix + side)
