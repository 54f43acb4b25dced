"""The installed version of Megatron-core, and temporary replacement of its symbols."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from slime_like.errors import TrainerError

SUPPORTED = ("0.16.1", "0.19.2")
"""Versions that the adaptations support: the newest for Python 3.11, and the newest for 3.12."""

INSTALLED = Version(version("megatron-core"))

IS_NEW = INSTALLED.release >= (0, 19)


def require(owner: Any, name: str) -> None:
    """Raise TrainerError if the installed version does not define the adapted ``owner.name``."""
    if not hasattr(owner, name):
        raise absent(f"{getattr(owner, '__name__', repr(owner))}.{name}")


def absent(spot: str) -> TrainerError:
    """Return the error for an adapted symbol that the installed version lacks."""
    return TrainerError(
        f"{spot} does not exist in megatron-core {INSTALLED}; the adaptations support {' and '.join(SUPPORTED)}",
        code="megatron-version",
        who="cpu_runtime",
        remedy=f"install megatron-core=={SUPPORTED[IS_NEW]}",
    )


@dataclass(frozen=True, slots=True)
class Patch:
    """Replacement of ``owner.name`` by ``value``. ``adds`` marks a name that the library fails to define itself."""

    owner: Any
    name: str
    value: Any
    adds: bool = False


_MISSING = object()


@contextlib.contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """Apply the patches inside the block.

    Raises:
        TrainerError: the installed Megatron-core does not have a symbol.
    """
    originals = []
    try:
        for patch in patches:
            if not patch.adds:
                require(patch.owner, patch.name)
            # Inherited values are not restored.
            originals.append((patch.owner, patch.name, vars(patch.owner).get(patch.name, _MISSING)))
            setattr(patch.owner, patch.name, patch.value)
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
