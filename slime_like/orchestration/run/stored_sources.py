"""Sources of trajectories on disk: demonstrations, and rollouts of an earlier run."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from slime_like.data.dump import dump_path, load_trajectories
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.errors import DataError
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.run.sources import Source
from slime_like.trajectory import ScoredTrajectory


class Demonstrations(Source):
    """Demonstrations from rows: supervised mode."""

    has_rewards = False

    def __init__(self, prompts: PromptSource, prompts_per_step: int) -> None:
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        with clock.phase("wait"):
            prompts = self._prompts.next(self._prompts_per_step)
        return [row for prompt in prompts for row in _demonstration(prompt)]

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._prompts.state_dict()}


class SavedRollouts(Source):
    """Rollouts that an earlier run saved, to train on without engines and reward workers.

    Args:
        directory: directory with one file per step.
        vocab_size: vocabulary size of the trained model.
        has_rewards: whether the run learns from their rewards.
    """

    def __init__(self, directory: Path, vocab_size: int, has_rewards: bool = True) -> None:
        self.has_rewards = has_rewards
        self._directory = directory
        self._vocab_size = vocab_size

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        """Load a step's file. Raises ``DataError`` if it is missing, damaged, or from a model with other tokens."""
        with clock.phase("wait"):
            path = dump_path(self._directory, step)
            trajectories = load_trajectories(path)
        largest = max(int(ids.max()) for t in trajectories for ids in (t.prompt_tokens, t.response_tokens) if len(ids))
        if largest >= self._vocab_size:  # an embedding split over ranks would return zeros
            raise DataError(
                f"contains token id {largest}, but model.path has ids 0 to {self._vocab_size - 1}",
                code="unknown-token",
                who=str(path),
                remedy="use rollouts of this model",
            )
        return trajectories


def _demonstration(prompt: Prompt) -> Iterator[ScoredTrajectory]:
    """Yield the training rows of a demonstration: several if the chat template changes earlier turns."""
    if prompt.response_tokens is None:
        raise DataError(
            f"prompt group {prompt.group_id} has no demonstration, which supervised mode needs",
            code="no-demonstration",
            remedy="give every row the key data.response_key",
        )
    tokens = torch.tensor((*prompt.input.token_ids, *prompt.response_tokens), dtype=torch.int64)
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    offset, rollout = len(prompt.input.token_ids), f"{prompt.group_id}-0"
    for start, end in prompt.spans or ((0, len(prompt.response_tokens)),):
        mask[offset + start : offset + end] = True
    for row, (start, end) in enumerate(pairwise((0, *(offset + fork for fork in prompt.forks or ()), len(tokens)))):
        first = start + int(mask[start:end].nonzero()[0])
        yield ScoredTrajectory.unrewarded(
            f"{rollout}.{row}" if prompt.forks else rollout,
            tokens[start:first],
            tokens[first:end],
            group_id=prompt.group_id,
            source=prompt.source,
            rollout_id=rollout,
            answer=prompt.answer,
            loss_mask=mask[first:end],
            **{name: torch.tensor(values) for name, values in prompt.input.fields.items()},
        )
