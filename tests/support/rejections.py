"""Expected errors, by type and code."""

import contextlib
from collections.abc import Iterator

import pytest


class Rejects:
    """The fixture ``rejects``."""

    @contextlib.contextmanager
    def __call__(self, kind: type[BaseException], code: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        """Require an error of this type with this code."""
        with pytest.raises(kind) as caught:
            yield caught
        assert getattr(caught.value, "code", None) == code
