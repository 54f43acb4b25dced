"""Memory settings of this process: the allocator, and objects that are never freed."""

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
    """Let glibc keep freed memory, in blocks of up to 1 GiB, from now on in this process.

    By itself it returns blocks of some MiB to the kernel as soon as they are freed, and a training step asks for the
    same ones again at once: faulting them in, zeroed page by page, is an eighth of a model's step on a CPU. The process
    stays at the size of its peak, which it reaches again in the next step.

    Returns:
        If it does; other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    sizes = {_M_MMAP_THRESHOLD: _KEPT_BYTES, _M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: _STEP_BYTES}
    return all(mallopt(parameter, size) == 1 for parameter, size in sizes.items())


@contextmanager
def permanent_allocations() -> Iterator[None]:
    """Exempt objects created inside from garbage collection, for imports of large packages.

    Python looks for garbage again and again while a trainer's packages make a million objects, a sixth of the time that
    their import takes, and later looks through all of them each time. Here it looks neither inside nor, afterwards, at
    what is there. When the process ends it does once more, since packages warn of objects that were not freed.
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
