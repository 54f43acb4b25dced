"""A receiver that keeps what it got, and puts changes into it."""

from collections.abc import Iterator

from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, TensorEntry
from slime_like.weights.delta.encoding import HeldTensor, apply_changes, as_integers
from slime_like.weights.transport import Receiver
from slime_like.weights.wire import metadata_from_wire

_BASE_LOST = "delta base lost"
"""In the message itself: engines hand errors of their workers on as text."""


def is_base_lost(error: BaseException) -> bool:
    """Return whether a sync failed because a receiver lacks the base of the changes; a whole sync helps."""
    return _BASE_LOST in str(error)


class DeltaReceiver:
    """Keeps a copy, in host memory, of every tensor. The whole tensors it yields are views of these copies.

    A wrong copy cannot go unnoticed: changes are rejected where the copy's checksum is not that of the sender's, and
    the receiver compares the hash of the result with the entry.
    """

    def __init__(self, inner: Receiver) -> None:
        self._inner = inner
        self._held: dict[str, HeldTensor] = {}

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        location = metadata.location
        payloads = self._inner.receive(metadata_from_wire(location["inner"]))
        parts = zip(metadata.entries, location["changes"], location["bases"], payloads, strict=True)
        for entry, changes, base, (_, payload) in parts:
            # Until the copy is what the entry says it is not to be built upon.
            held = self._held.pop(entry.name, None)
            whole = changes is None
            tensor = payload.to("cpu", copy=True) if whole else _changed(entry, held, base, payload, changes)
            self._held[entry.name] = HeldTensor(tensor, entry.checksum)
            yield entry.name, tensor

    def close(self) -> None:
        self._held.clear()
        self._inner.close()


def _changed(entry: TensorEntry, held: HeldTensor | None, base: int, payload: Tensor, changes: int) -> Tensor:
    if held is None or held.checksum != base or tuple(held.tensor.shape) != entry.shape:
        raise WeightSyncError(
            f"{_BASE_LOST}: changes came for {base:#018x}, and "
            f"{'nothing' if held is None else f'{held.checksum:#018x}'} is here",
            code="delta-base-lost",
            who=f"tensor {entry.name}",
            remedy="the next sync must send everything",
        )
    apply_changes(as_integers(held.tensor), payload.cpu(), changes)
    return held.tensor
