"""The frozen reference policy as a second set of weights for the same modules, kept on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from backends.fsdp.model import LogprobModel
from backends.fsdp.weights import copy_into, host_copies, own_tensors


class ReferenceWeights:
    """A host copy of this rank's shard. Scoring swaps it into the model's own storage and puts the policy back."""

    def __init__(self, model: LogprobModel) -> None:
        self._model = model
        self._frozen = host_copies(model)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the reference's weights; afterwards the policy's are back, bit for bit."""
        policy = [tensor.clone() for tensor in own_tensors(self._model)]
        copy_into(self._model, self._frozen)
        try:
            yield
        finally:
            copy_into(self._model, policy)


@contextlib.contextmanager
def preserved_weights(model: LogprobModel) -> Iterator[None]:
    """Inside, the model's weights may be overwritten; afterwards the present ones are back, bit for bit."""
    saved = host_copies(model)
    try:
        yield
    finally:
        copy_into(model, saved)
