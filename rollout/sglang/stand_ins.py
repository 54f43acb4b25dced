"""Names that make SGLang importable where packages of its CUDA installation are missing.

SGLang imports its CUDA kernels and torchvision by name on every platform. Neither has a build for a CPU-only torch from
the package index, and the models served here, on a CPU without AMX, call neither: SGLang computes with torch's own
operators there. So their names exist, and raise when they are called. Only SGLang's own processes install this; for
everything else the packages stay missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision", "IPython")


def install() -> None:
    """Stand in for those of ``PACKAGES`` that are not installed, in this process and those forked from it."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers the answer, which must be given before the name exists
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    absent = tuple(package for package in PACKAGES if find_spec(package) is None)
    if absent:
        sys.meta_path.append(_Finder(absent))


class _MissingName(type):
    """A class whose attributes are such classes again, and which cannot be called.

    A class, because SGLang uses the names in annotations, as base classes and as decorators' arguments, too.
    """

    def __getattr__(cls, name: str) -> _MissingName:
        return _missing(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__qualname__} was called, but {cls.__qualname__.partition('.')[0]} is not installed: SGLang needs "
            "it on this machine; install it, or use another engine"
        )


class _MissingModule(ModuleType):
    def __getattr__(self, name: str) -> _MissingName:
        return _missing(f"{self.__name__}.{name}", name)


class _Finder(MetaPathFinder, Loader):
    """Finds every module of the absent packages."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._packages:
            return spec_from_loader(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def _missing(full_name: str, name: str) -> _MissingName:
    if name.startswith("__"):
        raise AttributeError(full_name)
    return _MissingName(name, (), {"__module__": __name__, "__qualname__": full_name})
