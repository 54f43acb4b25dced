"""Check that this machine has room for Ray's object store, before Ray starts."""

from ray._private.ray_constants import REQUIRE_SHM_SIZE_THRESHOLD
from ray._private.utils import estimate_available_memory, get_shared_memory_bytes

from slime_like.config import ClusterConfig

_MIB = 2**20
_LEFT_FOR_WORK = 100 * _MIB
"""What Ray wants to be left beside the store."""

_DEFAULT = ClusterConfig().object_store_mb


def object_store_problem(size_mb: int) -> str | None:
    """Why a store of ``cluster.object_store_mb`` cannot be had here, in one sentence; ``None`` where it can."""
    return _problem(size_mb, int(estimate_available_memory()), get_shared_memory_bytes())


def _problem(size_mb: int, memory: int, shared: int) -> str | None:
    """A small store that shared memory has no room for Ray keeps on disk; a large one it refuses.

    Args:
        memory: bytes that are not in use, of the machine or of the container.
        shared: bytes that are left in /dev/shm.
    """
    field, nbytes = f"cluster.object_store_mb={size_mb}", size_mb * _MIB
    if nbytes > memory - _LEFT_FOR_WORK:
        return (
            f"{field}: of this machine's memory {memory // _MIB} MiB are free, and the run needs some, too; lower it "
            f"({_DEFAULT} is the default), or free memory"
        )
    if nbytes > max(shared, REQUIRE_SHM_SIZE_THRESHOLD):
        return (
            f"{field}: /dev/shm, where it lies, has {shared // _MIB} MiB left; use at most "
            f"{max(shared, REQUIRE_SHM_SIZE_THRESHOLD) // _MIB}, or make /dev/shm larger (Docker's --shm-size)"
        )
    return None
