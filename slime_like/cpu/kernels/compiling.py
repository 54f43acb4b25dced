"""Compiling kernels, and keeping what was compiled for the processes that come after.

Numba would keep it, too, but looks at the one file that a kernel stands in: after a change in another one, which the
kernel calls, it would go on with what it has. And it refuses a kernel where it can write nothing.
"""

from __future__ import annotations

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
from numba.core.caching import CompileResultCacheImpl, FunctionCache
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
        if _directory() is not None:
            dispatcher._cache = _KernelCache(function)  # as enable_caching does
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
    """Kernels of earlier sources. Who uses them after all, or removes them too, is not hindered: they are compiled anew
    where they are missing.
    """
    for directory in base.glob("kernels-*"):
        with contextlib.suppress(OSError):
            if time.time() - directory.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(directory)


class _Locator:
    """Numba's cache locator; only its directory is used, see ``_KernelFile``."""

    @classmethod
    def from_function(cls, function: Any, source: str) -> _Locator:
        return cls()

    def ensure_cache_path(self) -> None:
        """``_directory`` has."""

    def get_cache_path(self) -> str:
        return str(_directory())

    def get_source_stamp(self) -> str:
        return _stamp()

    def get_disambiguator(self) -> str:
        return ""


class _KernelFile:
    """One kernel's compiled code, behind a digest: one that is damaged is compiled again, not run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, key: object) -> Any:
        """``None`` if there is none, or not as it was written."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return pickle.loads(code) if hashlib.sha256(code).digest() == digest else None

    def save(self, key: object, data: object) -> None:
        """Write the file atomically. If that fails, the next process compiles, too."""
        code = dumps(data)
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=self._path.parent) as directory:
            written = Path(directory) / self._path.name
            written.write_bytes(hashlib.sha256(code).digest() + code)
            written.replace(self._path)


class _KernelCacheImpl(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 - Numba's own attribute


class _KernelCache(FunctionCache):
    _impl_class = _KernelCacheImpl

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}.kernel"
        self._cache_file = _KernelFile(Path(self.cache_path) / name)
