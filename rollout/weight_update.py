"""State of an engine's weights: served version, open update, failed update."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from slime_like.errors import EngineError, WeightSyncError
from slime_like.interfaces import Manifest, TensorEntry, UpdateReceipt
from slime_like.interfaces.weights import MODEL
from slime_like.weights.expected_tensors import require_complete, require_model

_MIXED = "has mixed weights since"


class WeightUpdateState:
    """Bookkeeping of begin, update and finish. Does not hold weights.

    After a failed update, the weights are a mixture of two versions. After a sleep without weights, there are none.
    Nothing may be sampled until the next update is finished. A check that raises also fails the open update.

    Args:
        targets: name and shape of every tensor that the manifest of an update must have, by what it updates.
    """

    def __init__(self, engine: str, targets: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
        self.version = 0
        self._engine = engine
        self._targets = targets
        self._manifest = Manifest({})
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

    def forget(self, reason: str) -> None:
        self._failure = reason
        self._open_version = None

    def begin(self, version: int, manifest: Manifest) -> None:
        """Open an update, and compare its manifest with its target. A tensor that is missing would stay stale."""
        was_whole, self._open_version = self.is_whole, version
        # An open update counts as failed until it is finished, so nothing is sampled whatever happens in between.
        self._failure = f"{_MIXED} the update to version {version} did not finish"
        if manifest.updates not in self._targets:
            known = ", ".join(self._targets)
            raise self._rejection(f"it cannot update {manifest.updates}, only {known}", "update-target")
        if manifest.updates != MODEL and MODEL in self._targets and not was_whole:
            problem = f"it cannot update {manifest.updates} before the {MODEL}, which is not whole"
            raise self._rejection(problem, "update-target")
        with self._failing():
            require_model(manifest, self._targets[manifest.updates], self._engine)
        self._manifest = manifest

    def check_bucket(self, entries: Sequence[TensorEntry]) -> None:
        """Reject tensors that the manifest does not have, or has with another type or shape."""
        self._require_open("update")
        for entry in entries:
            info = self._manifest.tensors.get(entry.name)
            if info is None:
                raise self._rejection(f"the update's manifest has no tensor {entry.name}", "unknown-tensor")
            if (info.dtype, info.shape) != (entry.dtype, entry.shape):
                found = f"{entry.name} is {entry.dtype} {entry.shape}"
                raise self._rejection(f"{found}, but the manifest has {info.dtype} {info.shape}", "tensor-shape")

    def check_complete(self, version: int, received: Mapping[str, int]) -> None:
        self._require_open("finish_update")
        if version != self._open_version:
            raise self._rejection(f"version {self._open_version} is open, not {version}", "other-version-open")
        with self._failing():
            require_complete(received, self._manifest.tensors, self._engine)

    def commit(self, received: Mapping[str, int], hash_s: float = 0.0) -> UpdateReceipt:
        assert self._open_version is not None
        self.version = self._open_version
        self._open_version = None
        self._failure = None
        return UpdateReceipt(self.version, dict(received), hash_s)

    def fail(self, reason: str) -> None:
        """Mark the open update, if any, as failed. The engine then refuses to sample."""
        if self._open_version is not None:
            self._failure = f"{_MIXED} the update to version {self._open_version} failed ({reason})"
        self._open_version = None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except WeightSyncError as error:
            self.fail(str(error))
            raise

    def _require_open(self, call: str) -> None:
        if self._open_version is None:
            raise self._rejection(f"{call} without an open update", "no-open-update", "call begin_update first")

    def _rejection(self, problem: str, code: str, remedy: str = "") -> WeightSyncError:
        error = WeightSyncError(problem, code=code, who=self._engine, remedy=remedy)
        self.fail(str(error))
        return error
