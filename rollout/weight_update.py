"""State of an engine's weights: served version, open update, failed update."""

from collections.abc import Mapping, Sequence

from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import TensorEntry, UpdateReceipt
from slime_like.weights.expected_tensors import require_complete

_MIXED = "has mixed weights since"


class WeightUpdateState:
    """Bookkeeping of begin, update and finish. Does not hold weights.

    After a failed update, the weights are a mixture of two versions. After a sleep without weights, there are none.
    Nothing may be sampled until the next update is finished. A check that raises also fails the open update.
    """

    def __init__(self, engine: str, expected: Mapping[str, tuple[int, ...]]) -> None:
        self.version = 0
        self.checksums: dict[str, int] = {}
        self._engine = engine
        self._expected = expected
        self._open_version: int | None = None
        self._failure: str | None = None

    def require_serving(self) -> None:
        """Raise ``EngineError`` unless all weights have the same version."""
        if self._failure is not None:
            raise EngineError(
                f"{self._engine} {self._failure}",
                code="mixed-weights",
                remedy="finish a complete weight update before sampling",
            )

    @property
    def is_whole(self) -> bool:
        """True if all weights have the same version, and no update is open."""
        return self._failure is None

    def forget(self) -> None:
        """Record that the engine dropped its weights."""
        self._failure = "dropped its weights when it went to sleep"
        self._open_version = None

    def begin(self, version: int) -> None:
        self._open_version = version
        # An open update counts as failed until it is finished, so nothing is sampled whatever happens in between.
        self._failure = f"{_MIXED} the update to version {version} did not finish"

    def check_bucket(self, entries: Sequence[TensorEntry]) -> None:
        """Reject tensors that are unknown or have the wrong shape."""
        self._require_open("update")
        for entry in entries:
            shape = self._expected.get(entry.name)
            if shape is None:
                raise self._rejection(f"the model has no tensor {entry.name}", "unknown-tensor")
            if shape != entry.shape:
                raise self._rejection(
                    f"{entry.name} has shape {entry.shape}, but the model needs {shape}", "tensor-shape"
                )

    def check_complete(self, version: int, received: Mapping[str, int]) -> None:
        self._require_open("finish_update")
        if version != self._open_version:
            raise self._rejection(f"version {self._open_version} is open, not {version}", "other-version-open")
        try:
            require_complete(received, self._expected, self._engine)
        except WeightSyncError as error:
            self.fail(str(error))
            raise

    def commit(self, received: Mapping[str, int], hash_s: float = 0.0) -> UpdateReceipt:
        assert self._open_version is not None
        self.version = self._open_version
        self.checksums = dict(received)
        self._open_version = None
        self._failure = None
        return UpdateReceipt(self.version, dict(received), hash_s)

    def fail(self, reason: str) -> None:
        """Mark the open update, if any, as failed. The engine then refuses to sample."""
        if self._open_version is not None:
            self._failure = f"{_MIXED} the update to version {self._open_version} failed ({reason})"
        self._open_version = None

    def _require_open(self, call: str) -> None:
        if self._open_version is None:
            raise self._rejection(f"{call} without an open update", "no-open-update", "call begin_update first")

    def _rejection(self, problem: str, code: str, remedy: str = "") -> WeightSyncError:
        error = WeightSyncError(problem, code=code, who=self._engine, remedy=remedy)
        self.fail(str(error))
        return error
