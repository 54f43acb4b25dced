"""Critic: the value model's ranks, and their turn in a training step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from slime_like.config import RunConfig
from slime_like.config.roles import CRITIC
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.cluster.ray_calls import Answers
from slime_like.orchestration.trainer.batcher import ExperienceBatcher
from slime_like.orchestration.trainer.calls import given
from slime_like.orchestration.trainer.checkpoint import Checkpoint
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.trainer.scoring import frozen_scores
from slime_like.statistics import ValueStats
from slime_like.trajectory import ScoredTrajectory


class Critic:
    """The value model of a run, on its own trainer ranks.

    It packs batches for its own layout, with the token weights and denominators of the policy's loss.

    Args:
        trainers: the policy's ranks. With ``critic.placement: shared``, one of the two models is on the devices at a
            time.
        pad_token_id: id of padding.

    Attributes:
        group: its ranks.
    """

    def __init__(self, config: RunConfig, placement: Placement, trainers: TrainerGroup, pad_token_id: int) -> None:
        self._config = config.for_critic()
        self._algorithm = config.algorithm
        self._pad_token_id = pad_token_id
        self._trainers = trainers
        self._is_shared = config.critic.placement == "shared"
        worker = None if self._is_shared else [role.name for role in placement.workers].index(CRITIC)
        self.group = TrainerGroup(self._config, placement, worker, trainers if self._is_shared else None)
        self._denominators: list[float] = []
        self._updates: list[Answers[Any]] = []

    @cached_property
    def _batcher(self) -> ExperienceBatcher:
        replicas, config = self.group.ranks.num_replicas, self._config
        return ExperienceBatcher(config.algorithm, config.trainer, config.model, replicas, self._pad_token_id)

    @contextmanager
    def turn(self, starts: bool = False) -> Iterator[None]:
        """Have the devices inside. The policy's ranks must be on them before, and are again after.

        Args:
            starts: the ranks are set up inside.
        """
        if self._is_shared:
            self._trainers.offload()
            if not starts:
                self.group.onload()
        yield
        if self._is_shared:
            self.group.offload()
            self._trainers.onload()

    def values(self, rows: Sequence[ScoredTrajectory]) -> dict[str, Tensor]:
        """Load a step's rows and return their values by sequence id, (response_len,) each, from the current weights."""
        ranks, batch = self.group.ranks, self._batcher.batch(rows, bool(self._config.distillation.teachers))
        self._denominators = batch.denominators
        ranks.defer(ranks.scatter("receiving a batch", TrainerRank.load_batch, batch.replicas))
        ranks.call("scoring with the critic", TrainerRank.score_batch, CRITIC)
        return {name: scores["values"] for name, scores in frozen_scores(ranks, rows, "values").items()}

    def learn(self, returns: Mapping[str, Tensor]) -> None:
        """Run the optimizer steps of the loaded rows towards ``returns``: as many as the policy's.

        On its own devices, it only starts them; ``statistics`` waits.
        """
        ranks, targets = self.group.ranks, {name: values.numpy() for name, values in returns.items()}
        ranks.defer(ranks.start("receiving returns", TrainerRank.set_tokens, "returns", targets))
        self._updates = [
            ranks.start("training the critic", TrainerRank.train_minibatch, index, denominator)
            for _ in range(self._algorithm.epochs)
            for index, denominator in enumerate(self._denominators)
        ]
        if self._is_shared:
            self.statistics()

    def statistics(self) -> list[ValueStats]:
        """Return the metrics of the step's optimizer steps, once they have ended."""
        return [given(answers.result())[0] for answers in self._updates]

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        with self.turn():
            self.group.ranks.call("loading a checkpoint", TrainerRank.load, checkpoint.critic)

    def export(self, directory: Path) -> None:
        """Write the critic as a Hugging Face model."""
        with self.turn():
            self.group.ranks.call("writing the critic", TrainerRank.export_hf, directory)
