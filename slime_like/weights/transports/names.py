"""Parts of transports that do not need torch: names, checks of sessions, removal of leftovers, library versions.

Help, checks and the process that removes a dead run's files import this module.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

from slime_like.errors import WeightSyncError

SHARED_MEMORY = Path("/dev/shm")
_MIN_SESSION = 8

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


def check_session(session: str) -> None:
    """Reject a session name that could match unrelated files."""
    if len(session) < _MIN_SESSION or not re.fullmatch(r"[A-Za-z0-9_-]+", session):
        raise WeightSyncError(
            f"weight sync session {session!r} is rejected: use at least {_MIN_SESSION} letters, digits, - or _, "
            "unique to the run, because files with this name are removed after it",
            code="session-name",
        )


def check_name(name: str, session: str) -> None:
    """Reject a file that does not belong to this session; names arrive by RPC."""
    if not name.startswith(f"{session}.") or "/" in name:
        raise WeightSyncError(f"{name} does not belong to weight sync {session}", code="foreign-bucket")


def buckets_in_flight(sender: str) -> WeightSyncError:
    return WeightSyncError(
        "two buckets are in flight", code="buckets-in-flight", who=f"weight sync {sender}", remedy="release one first"
    )


def cleanup(session: str, directories: Iterable[Path] = (SHARED_MEMORY,)) -> list[str]:
    """Remove files left behind by a dead sender of ``session``; return their names."""
    check_session(session)
    removed: list[str] = []
    for directory in filter(Path.is_dir, directories):
        left = sorted(path for path in directory.iterdir() if path.name.startswith(f"{session}."))
        for path in left:
            path.unlink(missing_ok=True)
        removed += [path.name for path in left]
    return removed


@dataclass(frozen=True, slots=True)
class Libraries:
    """Versions in one environment; empty if the library is not installed as a package.

    NCCL rejects a communicator whose members have different versions. The handles of torch's CUDA IPC are private to
    one version of torch.
    """

    torch: str
    nccl: str = ""

    _NCCL: ClassVar = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    PACKAGES: ClassVar = ("torch", *_NCCL)

    @classmethod
    def of(cls, packages: Mapping[str, str]) -> Self:
        nccl = next((packages[name] for name in cls._NCCL if name in packages), "")
        return cls(packages.get("torch", ""), nccl)

    def shares_nccl(self, other: Self) -> bool:
        """Return whether both use the same NCCL. If either lacks the package, compare the torch versions."""
        return self.torch == other.torch if "" in (self.nccl, other.nccl) else self.nccl == other.nccl

    def __str__(self) -> str:
        return f"torch {self.torch or 'of an unknown version'}" + (f" with NCCL {self.nccl}" if self.nccl else "")
