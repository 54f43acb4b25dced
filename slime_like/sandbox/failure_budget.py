"""Budget of first failures, after which code counts as broken."""


class FailureBudget:
    """Counter of failures before the first success. It is exhausted at ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.failures = 0
        self._closed = False

    def record(self, ok: bool) -> None:
        if ok:
            self.failures, self._closed = 0, True
        elif not self._closed:
            self.failures += 1

    @property
    def exhausted(self) -> bool:
        return self.failures >= self.limit
