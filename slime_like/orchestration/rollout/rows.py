"""Rollouts: samples of a prompt, and what counts once for all rows that one of them is trained as."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from slime_like.trajectory import UnscoredTrajectory

Row = TypeVar("Row", bound=UnscoredTrajectory)


@dataclass(frozen=True, slots=True)
class Rollout(Generic[Row]):
    """All rows of one sample, at least one; they share reward, advantage, answer, group and end."""

    rows: tuple[Row, ...]

    @property
    def last(self) -> Row:
        """The row that the rollout ended with."""
        return self.rows[-1]

    @property
    def group_id(self) -> int:
        return self.last.group_id

    @property
    def finish_reason(self) -> str:
        return self.last.finish_reason

    @property
    def sampled_len(self) -> int:
        """Tokens that the model sampled: rows that share a turn train it in one of them."""
        return sum(row.sampled_len for row in self.rows)

    @property
    def length(self) -> int:
        """Tokens that a limit counts: a single row's response, observations included; of several rows the sampled
        tokens, as prompts and responses of rows repeat each other."""
        return self.last.response_len if len(self.rows) == 1 else self.sampled_len

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token; ``None`` of a demonstration."""
        versions = [int(row.weight_versions.min()) for row in self.rows if row.weight_versions is not None]
        return min(versions, default=None)


def rollouts_of(rows: Iterable[Row]) -> list[Rollout[Row]]:
    """Rows by ``rollout_id``, in order of first appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.rollout_id, []).append(row)
    return [Rollout(tuple(members)) for members in found.values()]


def trained_spans(loss_mask: Tensor) -> list[tuple[int, int]]:
    """``[start, end)`` of every run of tokens that carry loss: of a row's turns, those that it trains."""
    edges = torch.nn.functional.pad(loss_mask.byte(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
