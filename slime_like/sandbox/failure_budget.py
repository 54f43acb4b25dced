"""Budget of failures in a row, after which code counts as broken."""


class FailureBudget:
    """Counter of failures in a row that is exhausted at ``limit``.

    With ``first_only``, the first success ends the counting for good. Otherwise it resets the count.
    """

    def __init__(self, limit: int, first_only: bool = False) -> None:
        self.limit = limit
        self.failures = 0
        self._first_only = first_only
        self._closed = False

    def record(self, ok: bool, count: int = 1) -> None:
        """Record ``count`` equal outcomes."""
        if ok:
            self.failures, self._closed = 0, self._first_only
        elif not self._closed:
            self.failures += count

    @property
    def exhausted(self) -> bool:
        return self.failures >= self.limit
