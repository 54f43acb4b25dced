"""Expected errors, by type and code."""

import contextlib
from collections.abc import Iterator

import pytest


class Rejects:
    """The fixture ``rejects``: one test's expected errors.

    Attributes:
        sentences: messages of the errors that were caught, in order.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []

    @contextlib.contextmanager
    def __call__(
        self, kind: type[BaseException], code: str | None = None
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        """Require an error of this type, with this code where one is given."""
        with pytest.raises(kind) as caught:
            yield caught
        if code is not None:
            assert getattr(caught.value, "code", None) == code
        if (text := str(caught.value)) not in self.sentences:
            self.sentences.append(text)
