"""The frozen reference policy as a second set of weights for the same modules, kept on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from backends.megatron.head import LogprobModel
from backends.megatron.weight_state import named_weights


class ReferenceWeights:
    """A host copy of this rank's shard. Scoring swaps it into the model's own storage and puts the policy back."""

    def __init__(self, chunks: Sequence[LogprobModel]) -> None:
        self._chunks = list(chunks)
        self._frozen = _host_copies(self._chunks)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the reference's weights; afterwards the policy's are back, bit for bit."""
        policy = [weight.detach().clone() for weight in _weights(self._chunks)]
        _copy_into(self._chunks, self._frozen)
        try:
            yield
        finally:
            _copy_into(self._chunks, policy)


@contextlib.contextmanager
def preserved_weights(chunks: Sequence[LogprobModel]) -> Iterator[None]:
    """Inside, the model's weights may be overwritten; afterwards the present ones are back, bit for bit."""
    saved = _host_copies(chunks)
    try:
        yield
    finally:
        _copy_into(chunks, saved)


def _weights(chunks: Sequence[LogprobModel]) -> list[Tensor]:
    return [weight for chunk in chunks for _, weight in named_weights(chunk)]


def _host_copies(chunks: Sequence[LogprobModel]) -> list[Tensor]:
    return [weight.detach().to("cpu", copy=True) for weight in _weights(chunks)]


@torch.no_grad()
def _copy_into(chunks: Sequence[LogprobModel], values: list[Tensor]) -> None:
    for weight, value in zip(_weights(chunks), values, strict=True):
        weight.copy_(value)
