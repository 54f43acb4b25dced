"""Temporary replacement of a library's symbol inside a ``with`` block."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backends.megatron.installed import require


@dataclass(frozen=True, slots=True)
class Patch:
    """Replacement of ``owner.name`` by ``value``. ``adds`` marks a name that the library fails to define itself."""

    owner: Any
    name: str
    value: Any
    adds: bool = False

    def check(self) -> None:
        """Raise TrainerError if the installed Megatron-core does not have the symbol."""
        if not self.adds:
            require(self.owner, self.name)


@contextlib.contextmanager
def applied(patch: Patch) -> Iterator[None]:
    """Apply the patch inside the block."""
    patch.check()
    missing = object()
    original = vars(patch.owner).get(patch.name, missing)  # inherited values are not restored
    setattr(patch.owner, patch.name, patch.value)
    try:
        yield
    finally:
        if original is missing:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, original)
