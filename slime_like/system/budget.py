"""A budget per hour, for what a long run survives now and then."""

import time
from collections import deque


class HourlyBudget:
    """Number of times that something may happen within an hour. The owner guards it against other threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._uses = deque[float]()

    @property
    def used(self) -> int:
        """Uses within the last hour."""
        while self._uses and time.monotonic() - self._uses[0] > 3600:
            self._uses.popleft()
        return len(self._uses)

    @property
    def left(self) -> int:
        return self.limit - self.used

    def use(self, count: int = 1) -> bool:
        """Use the budget, or return ``False`` if less is left."""
        may = self.left >= count
        self._uses.extend([time.monotonic()] * count * may)
        return may
