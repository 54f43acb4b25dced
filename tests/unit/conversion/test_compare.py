"""Comparison of two checkpoints: every kind of difference is found, and nothing else."""

import pytest
import torch
from torch import Tensor

from slime_like.conversion.convert import Difference, compare_sources
from slime_like.errors import CheckpointError
from slime_like.interfaces.conversion import TensorInfo


class InMemory:
    """A source whose tensors are read in groups of two."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._values = tensors
        self.tensors = {
            name: TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }

    @property
    def groups(self) -> list[list[str]]:
        names = list(self._values)
        return [names[start : start + 2] for start in range(0, len(names), 2)]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._values[name] for name in names}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(4, 3, generator=generator),
        "b": torch.randn(5, generator=generator).bfloat16(),
        "c": torch.randn(2, 2, generator=generator).half(),
        "scalar": torch.tensor(3.0),
    }


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[Difference]:
    return compare_sources(InMemory(ours), InMemory(theirs), 2, lambda done, total: None)


def test_equal_values_are_equal_in_any_memory_layout() -> None:
    assert differences(tensors(), tensors()) == []
    assert differences(tensors(), tensors() | {"a": tensors()["a"].t().contiguous().t()}) == []


def test_progress_is_in_bytes() -> None:
    reports: list[tuple[int, int]] = []
    compare_sources(InMemory(tensors()), InMemory(tensors()), 1, lambda done, total: reports.append((done, total)))
    assert reports[-1] == (12 * 4 + 5 * 2 + 4 * 2 + 4,) * 2


def test_every_difference_is_named() -> None:
    theirs = tensors() | {"a": tensors()["a"].double(), "c": torch.zeros(4, 1).half(), "extra": torch.zeros(1)}
    theirs["b"][2] += 1
    del theirs["scalar"]
    assert differences(tensors(), theirs) == [
        ("a", "type float32 in A, float64 in B"),
        ("b", "values: 1 of 5 differ, by at most 1"),
        ("c", "shape [2, 2] in A, [4, 1] in B"),
        ("extra", "only in B"),
        ("scalar", "only in A"),
    ]


def test_bits_count_not_numbers() -> None:
    """0 and -0 are equal as numbers. A NaN equals itself only as bits."""
    zero, minus = {"x": torch.zeros(3)}, {"x": -torch.zeros(3)}
    assert differences(zero, minus) == [Difference("x", "values: 3 of 3 differ, by at most 0")]
    nan = {"x": torch.tensor([1.0, float("nan")])}
    assert differences(nan, {"x": nan["x"].clone()}) == []
    assert differences(nan, {"x": torch.ones(2)}) == [Difference("x", "values: 1 of 2 differ, by at most inf")]


def test_a_damaged_side_ends_the_comparison() -> None:
    class Damaged(InMemory):
        def read(self, names: list[str]) -> dict[str, Tensor]:
            raise CheckpointError("it is damaged")

    with pytest.raises(CheckpointError):
        compare_sources(InMemory(tensors()), Damaged(tensors()), 2, lambda done, total: None)
