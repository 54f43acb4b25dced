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
_MODULES = MappingProxyType(
    {
        name: f"slime_like.weights.transports.{module}"
        for name, module in (
            ("shared_memory", "shared_memory"),
            ("gloo", "collective"),
            ("nccl", "collective"),
            ("cuda_ipc", "cuda_ipc"),
            ("directory", "directory"),
        )
    }
)


def transport_names() -> list[str]:
    return sorted(_MODULES)


def require_transport(name: str) -> None:
    """Raises ``WeightSyncError`` where ``sync.transport`` is not one."""
    if name not in _MODULES and name != AUTO:
        raise WeightSyncError(f"sync.transport={name} is unknown; use {AUTO} or one of {', '.join(transport_names())}")


def open_sender(name: str, session: str, settings: TransportSettings = TransportSettings()) -> Sender:  # noqa: B008
    """A sender of transport ``name``.

    Args:
        session: unique over all runs on this host; names whatever the transport creates, so that leftovers of a
            dead process are distinct from those of a live one.
        settings: where it listens or writes, and how long it waits.
    """
    sender: Sender = _module(name).open_sender(name, session, settings)
    return DeltaSender(sender) if settings.delta else sender


def join_rendezvous(rendezvous: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One rendezvous for all senders of a session, for ``open_receiver``; those that say the same are one."""
    different: list[Mapping[str, Any]] = []
    for one in rendezvous:
        if one not in different:
            different.append(one)
    if not different:
        raise WeightSyncError("no trainer rank sends weights; report this, with the layout of trainer.parallel")
    return dict(different[0]) if len(different) == 1 else {_SENDERS: [dict(one) for one in different]}


def open_receiver(name: str, rendezvous: Mapping[str, Any]) -> Receiver:
    """A receiver of transport ``name`` that meets the sender, or all senders, of ``rendezvous``."""
    if _SENDERS in rendezvous:
        return _ManyReceivers(name, rendezvous[_SENDERS])
    if _DELTA in rendezvous:
        return DeltaReceiver(open_receiver(name, rendezvous[_DELTA]))
    receiver: Receiver = _module(name).open_receiver(name, rendezvous)
    return receiver


class _ManyReceivers:
    """One receiver per sender; a bucket says whose it is."""

    def __init__(self, name: str, senders: Sequence[Mapping[str, Any]]) -> None:
        self._receivers: dict[str, Receiver] = {}
        for rendezvous in senders:
            self._receivers[_sender_id(rendezvous)] = open_receiver(name, rendezvous)

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        sender = metadata.location.get(_SENDER)
        if sender not in self._receivers:
            raise WeightSyncError(f"a bucket of sender {sender}, which this engine has not connected to")
        return self._receivers[sender].receive(metadata)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


def _sender_id(rendezvous: Mapping[str, Any]) -> str:
    inner = rendezvous.get(_DELTA, rendezvous)
    return str(inner[_SENDER])


def _module(name: str) -> Any:
    require_transport(name)
    if name == AUTO:
        raise WeightSyncError(f"sync.transport={AUTO} must be resolved first; see weights.transports.reach")
    return importlib.import_module(_MODULES[name])
