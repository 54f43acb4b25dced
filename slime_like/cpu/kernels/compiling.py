"""Compiling kernels, and keeping what was compiled for the processes that come after.

Numba would keep it, too, but looks at the one file that a kernel stands in: after a change in another one, which the
kernel calls, it would go on with what it has. And it refuses a kernel where it can write nothing.
"""

import contextlib
import hashlib
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import njit, void
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from slime_like.errors import SlimeLikeError

Array = np.ndarray

SUMS = frozenset({"contract", "reassoc"})
"""What LLVM may do to arithmetic: multiply and add at once, and add up in another order. NaN and infinity stay."""
IN_ORDER = frozenset({"contract"})
"""The same without another order."""
_UNUSED_S = 30 * 24 * 3600
"""After this long without a process that starts with them, kernels are removed."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def kernel(*arguments: Any, fastmath: frozenset[str] = SUMS) -> Callable[[Callable[..., None]], Any]:
    """Compile a function of these types, and no other, that returns nothing: other tensors are a TypeError.

    It runs without the interpreter's lock. Compiled code is read again by whatever process has the same sources,
    Numba and processor.

    Raises:
        SlimeLikeError: compiling is disabled in Numba. The check before a run finds it on the machine that starts it.
    """
    if numba.config.DISABLE_JIT:
        raise SlimeLikeError(
            "NUMBA_DISABLE_JIT keeps Numba from compiling the kernels for a CPU, which do not run uncompiled",
            code="jit-disabled",
            remedy="unset it in the environment, or in .numba_config.yaml",
        )

    def decorate(function: Callable[..., None]) -> Any:
        dispatcher: Any = njit(fastmath=set(fastmath), error_model="numpy", nogil=True)(function)
        if directory := _directory():
            dispatcher._cache = _KernelCache(function, directory)  # as enable_caching does
        dispatcher.compile(void(*arguments))
        dispatcher.disable_compile()
        return dispatcher

    return decorate


def part(fastmath: frozenset[str] = SUMS) -> Callable[[Callable[..., Any]], Any]:
    """Mark a function that kernels call; it is compiled with each of them."""
    decorate: Callable[[Callable[..., Any]], Any] = njit(fastmath=set(fastmath), error_model="numpy")
    return decorate


@cache
def _stamp() -> str:
    """Changes with anything that compiled code depends on."""
    processor = llvmlite.binding.get_host_cpu_name() + llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(f"{numba.__version__} {processor}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _places() -> Iterator[Path]:
    yield Path(__file__).parent / "__pycache__"
    with contextlib.suppress(RuntimeError):  # who has no home
        yield Path.home() / ".cache" / "slime-like"


@cache
def _directory() -> Path | None:
    """Return the cache directory: beside the sources or in the home directory; ``None`` if neither is writable."""
    for base in _places():
        directory = base / f"kernels-{_stamp()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
            os.utime(directory)  # its last use
        except OSError:
            continue
        _remove_unused(base)
        return directory
    return None


def _remove_unused(base: Path) -> None:
    """Kernels of earlier sources; a process that needs them after all compiles them again."""
    for directory in base.glob("kernels-*"):
        with contextlib.suppress(OSError):
            if time.time() - directory.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(directory)


class _KernelCache:
    """One kernel's compiled code, as Numba's dispatcher asks for it; what is damaged is compiled again, not run."""

    def __init__(self, function: Callable[..., None], directory: Path) -> None:
        self.cache_path = str(directory)  # for the dispatcher's statistics
        self._path = directory / f"{function.__module__.rpartition('.')[2]}.{function.__name__}.kernel"

    def load_overload(self, signature: object, context: Any) -> Any:
        """``None`` if there is none, or not as it was written."""
        context.refresh()
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return CompileResult._rebuild(context, *pickle.loads(code)) if hashlib.sha256(code).digest() == digest else None

    def save_overload(self, signature: object, result: Any) -> None:
        """Write the file atomically. If that fails, the next process compiles, too."""
        assert not result.library.has_dynamic_globals, "addresses of this process cannot be kept"
        code = dumps(result._reduce())
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=self._path.parent) as directory:
            written = Path(directory) / self._path.name
            written.write_bytes(hashlib.sha256(code).digest() + code)
            written.replace(self._path)
