"""The frozen reference policy as a second set of weights for the same modules, kept on the host."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from backends.common.trainer.state import TrainerState
from slime_like.config import RunConfig
from slime_like.errors import ConfigError


@contextlib.contextmanager
def in_place(state: TrainerState, frozen: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the model computes with ``frozen``, host copies; afterwards the policy's weights are back, bit for bit.

    They are swapped into the model's own storage.
    """
    policy = [weight.detach().clone() for weight in state.weights()]
    _copy_into(state, frozen)
    try:
        yield
    finally:
        _copy_into(state, policy)


@contextlib.contextmanager
def preserved_weights(state: TrainerState) -> Iterator[None]:
    """Inside, the model's weights may be overwritten; afterwards the present ones are back, bit for bit."""
    saved = host_copies(state)
    try:
        yield
    finally:
        _copy_into(state, saved)


def configured_reference(config: RunConfig, state: TrainerState) -> list[Tensor] | None:
    """Host copies of the run's reference; None where the trainer holds none. Collective.

    Raises:
        ConfigError: it is another model.
    """
    if not config.reference_in_trainer:
        return None
    path = config.reference.path
    if path is None or (path == config.model.path and config.model.weights is None):
        return host_copies(state)
    if not state.is_same_model(path):
        raise ConfigError(
            f"reference.path={path}: its model has other dimensions, or other settings, than model.path; "
            "use one of the same, or reference.placement=workers"
        )
    with preserved_weights(state):
        state.load_hugging_face(path)
        return host_copies(state)


def host_copies(state: TrainerState) -> list[Tensor]:
    """This rank's shard of the present weights."""
    return [weight.detach().to("cpu", copy=True) for weight in state.weights()]


@torch.no_grad()
def _copy_into(state: TrainerState, values: Sequence[Tensor]) -> None:
    for weight, value in zip(state.weights(), values, strict=True):
        weight.copy_(value)
