"""Built-in transports. Imports no torch: help lists them."""

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
"""Module, and what the names of its sender's and receiver's classes begin with. Modules are named, not imported: a
transport may need libraries that only its own users have installed."""
