"""Versions of the libraries that both ends of a transport between GPUs must have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True)
class Libraries:
    """Versions in one environment; empty for a library that is not installed as a package.

    NCCL rejects a communicator whose members have different versions, and the handles of torch's CUDA IPC are private
    to a version of torch.
    """

    torch: str
    nccl: str = ""

    _NCCL: ClassVar = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    PACKAGES: ClassVar = ("torch", *_NCCL)

    @classmethod
    def of(cls, packages: Mapping[str, str]) -> Self:
        """Of an environment's packages, by distribution."""
        nccl = next((packages[name] for name in cls._NCCL if name in packages), "")
        return cls(packages.get("torch", ""), nccl)

    def shares_nccl(self, other: Self) -> bool:
        """Return whether both have one NCCL. Without a package on one side, the versions of torch decide."""
        return self.torch == other.torch if "" in (self.nccl, other.nccl) else self.nccl == other.nccl

    def __str__(self) -> str:
        return f"torch {self.torch or 'of an unknown version'}" + (f" with NCCL {self.nccl}" if self.nccl else "")
