"""The frozen reference policy as a second set of weights for the same modules, kept on the host."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from backends.common.trainer.state import TrainerState
from slime_like.config import RunConfig
from slime_like.errors import ConfigError


class ReferenceWeights:
    """A host copy of this rank's shard. Scoring swaps it into the model's own storage and puts the policy back."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state
        self._frozen = _host_copies(state)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the reference's weights; afterwards the policy's are back, bit for bit."""
        policy = [weight.detach().clone() for weight in self._state.weights()]
        _copy_into(self._state, self._frozen)
        try:
            yield
        finally:
            _copy_into(self._state, policy)


@contextlib.contextmanager
def preserved_weights(state: TrainerState) -> Iterator[None]:
    """Inside, the model's weights may be overwritten; afterwards the present ones are back, bit for bit."""
    saved = _host_copies(state)
    try:
        yield
    finally:
        _copy_into(state, saved)


def configured_reference(config: RunConfig, state: TrainerState) -> ReferenceWeights | None:
    """The reference of the run; None where the trainer holds none. Collective.

    Raises:
        ConfigError: it is another model.
    """
    if not config.reference_in_trainer:
        return None
    path = config.reference.path
    if path is None or (path == config.model.path and config.model.weights is None):
        return ReferenceWeights(state)
    if not state.is_same_model(path):
        raise ConfigError(
            f"reference.path={path}: its model has other dimensions, or other settings, than model.path; "
            "use one of the same, or reference.placement=workers"
        )
    with preserved_weights(state):
        state.load_hugging_face(path)
        return ReferenceWeights(state)


def _host_copies(state: TrainerState) -> list[Tensor]:
    return [weight.detach().to("cpu", copy=True) for weight in state.weights()]


@torch.no_grad()
def _copy_into(state: TrainerState, values: Sequence[Tensor]) -> None:
    for weight, value in zip(state.weights(), values, strict=True):
        weight.copy_(value)
