"""Replacing a symbol of a library for the length of a ``with`` block."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from slime_like.errors import TrainerError

PINNED_MEGATRON = "0.16.1"


@dataclass(frozen=True, slots=True)
class Patch:
    """Replace ``owner.name`` by ``value``. ``adds`` marks a name that the pinned version fails to define itself."""

    owner: Any
    name: str
    value: Any
    adds: bool = False

    def check(self) -> None:
        """Raises TrainerError when the pinned Megatron-core no longer has the symbol."""
        if not self.adds and not hasattr(self.owner, self.name):
            owner = getattr(self.owner, "__name__", repr(self.owner))
            raise TrainerError(
                f"{owner}.{self.name} does not exist in megatron-core {version('megatron-core')} (the adaptation was "
                f"written for {PINNED_MEGATRON})",
                code="megatron-version",
                who="cpu_runtime",
                remedy=f"install megatron-core=={PINNED_MEGATRON}",
            )


@contextlib.contextmanager
def applied(patch: Patch) -> Iterator[None]:
    """Inside, the patch is in place."""
    patch.check()
    missing = object()
    original = vars(patch.owner).get(patch.name, missing)  # what a class inherits is not put back
    setattr(patch.owner, patch.name, patch.value)
    try:
        yield
    finally:
        if original is missing:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, original)
