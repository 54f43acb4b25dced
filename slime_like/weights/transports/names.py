"""Built-in transports. Doesn't import torch, because help lists them."""

from collections.abc import Mapping
from types import MappingProxyType

TRANSPORTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "shared_memory": ("shared_memory", "SharedMemory"),
        "gloo": ("collective", "Collective"),
        "nccl": ("collective", "Collective"),
        "colocated": ("colocated", "Colocated"),
        "directory": ("directory", "Directory"),
    }
)
"""Module, and prefix of its sender and receiver class names. Modules are named rather than imported: a transport may
need libraries that only its users have installed."""
