"""Library versions that must match on both ends of a transport between GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self


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
