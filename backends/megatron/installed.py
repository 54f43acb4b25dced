"""The installed version of Megatron-core."""

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
        f"{spot} does not exist in megatron-core {INSTALLED} (the adaptations were written for "
        f"{' and '.join(SUPPORTED)})",
        code="megatron-version",
        who="cpu_runtime",
        remedy=f"install megatron-core=={SUPPORTED[IS_NEW]}",
    )
