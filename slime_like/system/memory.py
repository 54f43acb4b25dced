"""Memory settings of this process."""

import atexit
import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_NEVER, _KEPT_BYTES = -1, 2**30
_STEP_BYTES = 2**26


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, in blocks of up to 1 GiB.

    By default, glibc returns blocks of some MiB to the kernel as soon as they are freed, and the next operation of a
    training step allocates them again. The page faults take an eighth of a step on a CPU. The process stays at its peak
    size, which it would reach again in the next step. Returns ``False`` with another C library, which is left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    sizes = {_M_MMAP_THRESHOLD: _KEPT_BYTES, _M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: _STEP_BYTES}
    return all(mallopt(parameter, size) == 1 for parameter, size in sizes.items())


@contextmanager
def permanent_allocations() -> Iterator[None]:
    """Exempt objects created inside from garbage collection, for imports of large packages.

    Searching a trainer's million objects for garbage takes a sixth of the import's time, and later more time in every
    collection. The exemption ends with the process, since packages warn of objects that were not freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)
    finally:
        if was_on:
            gc.enable()
