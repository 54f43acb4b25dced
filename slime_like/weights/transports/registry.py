"""Transports by name."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

from slime_like.errors import WeightSyncError
from slime_like.weights.transports.base import Receiver, Sender

AUTO = "auto"

# Modules are named, not imported: a transport may need libraries that only its own users have installed.
_MODULES = MappingProxyType({"shared_memory": "slime_like.weights.transports.shared_memory"})


def transport_names() -> list[str]:
    return sorted(_MODULES)


def resolve_transport(name: str) -> str:
    """The transport that ``sync.transport`` stands for; "auto" is the one for trainers and engines on one host."""
    resolved = "shared_memory" if name == AUTO else name
    _module_name(resolved)
    return resolved


def open_sender(name: str, session: str) -> Sender:
    """A sender of transport ``name``.

    Args:
        session: unique over all runs on this host; names whatever the transport creates, so that the leavings of a
            dead process can be told from a living one's.
    """
    return importlib.import_module(_module_name(resolve_transport(name))).open_sender(session)


def open_receiver(name: str, rendezvous: dict[str, Any]) -> Receiver:
    """A receiver of transport ``name`` that meets the sender of ``rendezvous``."""
    return importlib.import_module(_module_name(resolve_transport(name))).open_receiver(rendezvous)


def _module_name(name: str) -> str:
    if name not in _MODULES:
        raise WeightSyncError(f"sync.transport={name} is unknown; use {AUTO} or one of {', '.join(transport_names())}")
    return _MODULES[name]
