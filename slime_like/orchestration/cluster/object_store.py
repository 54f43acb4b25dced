"""Check for room for Ray's object store on this machine, before Ray starts."""

import shutil
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_like.config import ClusterConfig

_MIB = 2**20
_LEFT_FOR_WORK = 100 * _MIB
"""Memory that Ray requires in addition to the store."""

_ON_DISK = 10**10
"""Largest store that Ray keeps on disk if /dev/shm has no room for it. Ray refuses larger ones."""

_CGROUPS = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""Files with limit and usage, and the prefix of fields in memory.stat, for cgroup versions 2 and 1."""

_DEFAULT = ClusterConfig().object_store_mb


def object_store_problem(size_mb: int) -> str | None:
    """Return why a store of ``cluster.object_store_mb`` does not fit here, in one sentence, or ``None``."""
    memory, shared = available_memory(), shutil.disk_usage("/dev/shm").free
    field, nbytes = f"cluster.object_store_mb={size_mb}", size_mb * _MIB
    if nbytes > memory - _LEFT_FOR_WORK:
        return (
            f"{field}: of this machine's memory {memory // _MIB} MiB are free, and the run needs some, too; lower it "
            f"({_DEFAULT} is the default), or free memory"
        )
    if nbytes > max(shared, _ON_DISK):
        return (
            f"{field}: /dev/shm, which holds it, has {shared // _MIB} MiB left; use at most "
            f"{max(shared, _ON_DISK) // _MIB}, or make /dev/shm larger (Docker's --shm-size)"
        )
    return None


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the unused bytes of the container, or of the machine outside of one. File caches count as unused."""
    memory = psutil.virtual_memory()
    for directory, (limit, usage, prefix) in zip((cgroup, cgroup / "memory"), _CGROUPS, strict=True):
        if (directory / usage).is_file():
            fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            caches = int(fields[f"{prefix}inactive_file"]) + int(fields[f"{prefix}active_file"])
            most = (directory / limit).read_text().strip()
            total = min(memory.total, int(most)) if most.isdecimal() else memory.total
            return int(total - int((directory / usage).read_text()) + caches)
    return int(memory.total - memory.used)
