"""ReferenceWeights: the directory that reference workers score with, and those that are still being read."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ReferenceWeights:
    """Shared by the training loop, which replaces the weights, and the workers' threads, which read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Path | None = None
        self._readers: Counter[Path] = Counter()

    def use(self, weights: Path) -> None:
        """Score with the weights in this directory, from the next request on."""
        with self._lock:
            self._newest = weights

    def in_use(self) -> set[Path]:
        """Directories that a worker may be reading."""
        with self._lock:
            return {weights for weights, readers in self._readers.items() if readers}

    @contextmanager
    def reading(self) -> Iterator[Path | None]:
        """The weights to use, in use inside the block; none until ``use`` is called."""
        with self._lock:
            weights = self._newest
            if weights is not None:
                self._readers[weights] += 1
        try:
            yield weights
        finally:
            with self._lock:
                if weights is not None:
                    self._readers[weights] -= 1
