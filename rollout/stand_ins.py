"""Stand-ins for packages of the engines' CUDA installations, which make engines importable without them.

SGLang imports its CUDA kernels on every platform. SGLang, and vLLM for models with a tower, import torchvision. The
package index has no builds of them for CPU-only torch. On a CPU without AMX, the engines never call them for text, but
compute with torch's operators. So their names exist, and raise when called. Only the engines' own processes install the
stand-ins, vLLM's as a plugin.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

VLLM = ("torchvision",)
SGLANG = ("sgl_kernel", "torchvision", "IPython")


def install(packages: Sequence[str] = VLLM) -> None:
    """Replace the missing ones of ``packages``, in this process and those forked from it."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers caches the answer, so ask before the name exists
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    absent = tuple(package for package in packages if find_spec(package) is None)
    if absent:
        sys.meta_path.append(_Finder(absent))


class _MissingName(type):
    """Class that cannot be called, and whose attributes are such classes.

    It is a class because engines also use the names in annotations, as base classes, and in decorators.
    """

    def __getattr__(cls, name: str) -> _MissingName:
        return _missing(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        package = cls.__qualname__.partition(".")[0]
        remedy = "install it, or use another engine"
        raise NotImplementedError(f"{cls.__qualname__}: the engine needs {package} on this machine; {remedy}")


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
