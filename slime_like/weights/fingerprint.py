"""Fingerprint of a tensor. It shows whether two tensors have equal bytes, and estimates how far apart they are."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from slime_like.weights.checksums import tensor_checksum

_PROJECTIONS, _COLUMNS, _ROWS = 16, 4096, 256
"""Number of projections, elements of a row, and rows that are projected together: 8 MiB in float64."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fingerprint of one tensor, the same for every layout that the tensor was gathered from.

    Attributes:
        checksum: ``tensor_checksum`` of the bytes.
        norm: in float64.
        projections: float64 sums of the elements with random signs, a fixed sign per element and projection. By them,
            two tensors' distance is known within about 20 % (Achlioptas: Database-friendly random projections, 2001).
    """

    checksum: int
    norm: float
    projections: tuple[float, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        flat, squares = tensor.detach().reshape(-1), 0.0
        of_columns, of_rows = _signs(_COLUMNS, 0), _signs(-(-flat.numel() // _COLUMNS), 1)
        total = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=flat.device)
        for part, signs in zip(flat.split(_ROWS * _COLUMNS), of_rows.split(_ROWS), strict=True):
            rows = torch.nn.functional.pad(part.double(), (0, -part.numel() % _COLUMNS)).view(-1, _COLUMNS)
            total += ((rows @ of_columns.to(flat.device)) * signs.to(flat.device)).sum(0)
            squares += float(rows.square().sum())
        return cls(tensor_checksum(tensor), squares**0.5, tuple(total.tolist()))

    def distance(self, other: Self) -> float:
        """Estimate the norm of the difference of the two tensors, which have the same shape."""
        pairs = zip(self.projections, other.projections, strict=True)
        return (sum((a - b) ** 2 for a, b in pairs) / _PROJECTIONS) ** 0.5


def _signs(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count, _PROJECTIONS), generator=generator).double() * 2 - 1
