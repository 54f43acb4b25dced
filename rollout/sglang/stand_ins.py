"""Stand-ins for packages of SGLang's CUDA installation, which make SGLang importable without them.

SGLang imports its CUDA kernels and torchvision on every platform. The package index has no builds of them for CPU-only
torch. On a CPU without AMX, SGLang never calls them, but computes with torch's operators. So their names exist, and
raise when called. Only SGLang's own processes install the stand-ins.
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
    """Replace the missing ones of ``PACKAGES``, in this process and those forked from it."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers caches the answer, so ask before the name exists
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    absent = tuple(package for package in PACKAGES if find_spec(package) is None)
    if absent:
        sys.meta_path.append(_Finder(absent))


class _MissingName(type):
    """Class that cannot be called, and whose attributes are such classes.

    It is a class because SGLang also uses the names in annotations, as base classes, and in decorators.
    """

    def __getattr__(cls, name: str) -> _MissingName:
        return _missing(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__qualname__}: SGLang needs {cls.__qualname__.partition('.')[0]} on this machine, but it is not "
            "installed; install it, or use another engine"
        )


class _MissingModule(ModuleType):
    def __getattr__(self, name: str) -> _MissingName:
        return _missing(f"{self.__name__}.{name}", name)


class _Finder(MetaPathFinder, Loader):
    """Finder of every module in the missing packages."""

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
        """Do nothing: the module has no code."""


def _missing(full_name: str, name: str) -> _MissingName:
    if name.startswith("__"):
        raise AttributeError(full_name)
    return _MissingName(name, (), {"__module__": __name__, "__qualname__": full_name})
