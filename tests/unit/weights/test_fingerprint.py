"""Fingerprints of tensors: equal bytes, and the estimated distance of others."""

import pytest
import torch

from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.fingerprint import Fingerprint


@pytest.mark.parametrize("shape", [(1,), (7,), (4096,), (300, 4099), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_distance_of_two_tensors_is_estimated(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(shape, generator=generator).to(dtype)
    second = (first.float() + 1e-2 * torch.randn(shape, generator=generator)).to(dtype)
    ours, theirs = Fingerprint.of(first), Fingerprint.of(second)
    assert ours.checksum == tensor_checksum(first) and ours.norm == pytest.approx(float(first.double().norm()))
    distance = float((first.double() - second.double()).norm())
    assert ours.distance(theirs) == pytest.approx(distance, rel=0.6)  # three standard deviations
    assert ours.distance(ours) == 0.0


@pytest.mark.parametrize("at", [0, 4095, 4096, 1_048_576, 1_228_000])
def test_one_changed_element_of_many_has_its_size(at: int) -> None:
    """In any row and in any part of rows, with a view that is not contiguous."""
    tensor = torch.randn(1228801, generator=torch.Generator().manual_seed(0))[:-1].view(1024, 1200).T
    changed = tensor.clone()
    changed[at % 1200, at // 1200] += 0.25
    ours, theirs = Fingerprint.of(tensor), Fingerprint.of(changed)
    assert ours.checksum != theirs.checksum
    assert ours.distance(theirs) == pytest.approx(0.25, abs=1e-6)  # every projection changes by it


def test_changes_of_opposite_sign_do_not_cancel() -> None:
    """Their sum is 0, also in each column."""
    tensor = torch.zeros(8, 4096)
    tensor[0], tensor[1] = 1.0, -1.0
    zero = Fingerprint.of(torch.zeros(8, 4096))
    assert Fingerprint.of(tensor).distance(zero) == pytest.approx(float(tensor.norm()), rel=0.6)
