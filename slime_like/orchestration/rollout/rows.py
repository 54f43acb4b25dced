"""Rollouts: the samples of a prompt, and the values that all rows of a sample share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slime_like.trajectory import UnscoredTrajectory

_LEAST_SPREAD = 1e-6
"""A smaller standard deviation of advantages is rounding."""

Row = TypeVar("Row", bound=UnscoredTrajectory)


@dataclass(frozen=True, slots=True)
class Rollout(Generic[Row]):
    """All rows of one sample, at least one. They share reward, advantage, answer, group and finish reason."""

    rows: tuple[Row, ...]

    @property
    def last(self) -> Row:
        """Row that the rollout ended with."""
        return self.rows[-1]

    @property
    def group_id(self) -> int:
        return self.last.group_id

    @property
    def finish_reason(self) -> str:
        return self.last.finish_reason

    @property
    def sampled_len(self) -> int:
        """Number of sampled tokens. A turn in several rows counts in the one that trains it."""
        return sum(row.sampled_len for row in self.rows)

    @property
    def length(self) -> int:
        """Number of tokens for limits: a single row's response, including observations. With several rows, which repeat
        each other, only sampled tokens count."""
        return self.last.response_len if len(self.rows) == 1 else self.sampled_len

    @property
    def turn_rewards(self) -> Sequence[float]:
        """Rewards of turns, as in ``Conversation``; empty after a failure."""
        return self._of_turns("rewards")

    @property
    def calls(self) -> Sequence[int]:
        """Numbers of the turns of ``turn_rewards``."""
        return self._of_turns("calls")

    def _of_turns(self, name: str) -> Sequence[Any]:
        row: Any = self.last
        if row.conversation is not None:
            return getattr(row.conversation, name) if row.conversation.failure is None else ()
        found: Sequence[Any] = getattr(row, "reward_metadata", {}).get("conversation", {}).get(name, ())
        return found

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that sampled a token; ``None`` for a demonstration."""
        versions = [int(row.weight_versions.min()) for row in self.rows if row.weight_versions is not None]
        return min(versions, default=None)


def rollouts_of(rows: Iterable[Row]) -> list[Rollout[Row]]:
    """Group rows by ``rollout_id``, in order of first appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.rollout_id, []).append(row)
    return [Rollout(tuple(members)) for members in found.values()]


def trained_spans(loss_mask: Tensor) -> list[tuple[int, int]]:
    """Return ``[start, end)`` of every run of loss-carrying tokens: the turns that a row trains."""
    if len(loss_mask) and loss_mask.all():  # most rows, and much faster
        return [(0, len(loss_mask))]
    edges = torch.nn.functional.pad(loss_mask.byte(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def whiten(rows: Sequence[UnscoredTrajectory], advantages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return advantages with mean 0 and sample standard deviation 1 over all tokens that carry loss, 0 elsewhere.

    Without a spread, all are 0.
    """
    each = {row.sequence_id: advantages[row.sequence_id].double().expand(row.response_len) for row in rows}
    tokens = torch.cat([each[row.sequence_id][row.loss_mask] for row in rows])
    spread = tokens.std() if tokens.numel() > 1 else tokens.new_zeros(())
    scale = 1 / spread if float(spread) > _LEAST_SPREAD else 0.0
    made = {name: ((values - tokens.mean()) * scale).to(advantages[name].dtype) for name, values in each.items()}
    return {row.sequence_id: made[row.sequence_id].masked_fill(~row.loss_mask, 0.0) for row in rows}
