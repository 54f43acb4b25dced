"""OffloadedTensor activations return to the device before the operator that needs them."""

import pytest
import torch
from torch import Tensor

from backends.common.trainer.host_memory import HostPool
from backends.megatron import activations
from backends.megatron.activations import ActivationOffload, OffloadedTensor

SIZE = 64


class Logged(ActivationOffload):
    """Offload that logs fetched and taken tensors by their number in the forward pass."""

    def __init__(self) -> None:
        super().__init__([], HostPool())
        self.log: list[str] = []

    def _fetch(self, saved: OffloadedTensor) -> Tensor:
        self.log.append(f"fetch {_number(saved)}")
        return super()._fetch(saved)

    def _to_device(self, saved: Tensor | OffloadedTensor) -> Tensor:
        tensor = super()._to_device(saved)
        assert isinstance(saved, OffloadedTensor) and saved.fetched is None
        self.log.append(f"take {_number(saved)}")
        return tensor


def _chain(x: Tensor) -> Tensor:
    for _ in range(5):
        x = torch.sigmoid(x)  # saves its result
    return x


def _number(saved: OffloadedTensor) -> int:
    return 0 if saved.before is None else 1 + _number(saved.before)


def test_the_tensors_needed_next_are_fetched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(activations, "AHEAD_BYTES", 2 * SIZE * 4)
    offload = Logged()
    for _ in range(2):  # the second forward pass must not fetch tensors of the first one
        x = torch.linspace(-2, 1, SIZE, requires_grad=True)
        with offload.saving():
            y = _chain(x)
        y.sum().backward()
        ahead = ["fetch 4", "fetch 3", "fetch 2", "take 4", "fetch 1", "take 3", "fetch 0"]
        assert offload.log == [*ahead, "take 2", "take 1", "take 0"]
        offload.log.clear()
        plain = x.detach().requires_grad_()
        _chain(plain).sum().backward()
        assert torch.equal(x.grad, plain.grad)
