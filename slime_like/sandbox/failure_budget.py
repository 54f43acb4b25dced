"""Budget of failures before code counts as broken."""


class FailureBudget:
    """Count of failures in a row, ``limit`` of which exhaust the budget.

    With ``first_only`` a success closes the budget for good; otherwise the count starts afresh.
    """

    def __init__(self, limit: int, first_only: bool = False) -> None:
        self.limit = limit
        self.failures = 0
        self._first_only = first_only
        self._closed = False

    def record(self, ok: bool, count: int = 1) -> None:
        """Add one outcome, or ``count`` equal ones."""
        if ok:
            self.failures, self._closed = 0, self._first_only
        elif not self._closed:
            self.failures += count

    @property
    def exhausted(self) -> bool:
        return self.failures >= self.limit
