"""ExperienceBatcher: scored trajectories become packed micro-batches for every data-parallel replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from slime_like.algorithms.context import padded_length
from slime_like.algorithms.packing import pack_sequences, zero_weight_pack
from slime_like.algorithms.partition import partition_by_tokens, training_flops
from slime_like.algorithms.reduction import step_denominator, token_weights
from slime_like.config import RunConfig
from slime_like.config.dimensions import ModelDimensions
from slime_like.errors import DataError
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory


@dataclass(slots=True)
class TrainingBatch:
    """What one training step feeds the trainers.

    Attributes:
        replicas: [data-parallel replica][minibatch][micro-batch]; every replica has the same counts.
        denominators: one per minibatch: tokens, samples or groups of that optimizer step.
        packed_tokens: tokens computed, padding and fillers included.
        actual_tokens: tokens of real sequences.
    """

    replicas: list[list[list[PackedTrajectory]]]
    denominators: list[float]
    packed_tokens: int
    actual_tokens: int


class ExperienceBatcher:
    """Packs by ``trainer.target_tokens_per_batch``; balances replicas by ``trainer.balance``, tokens or FLOPs."""

    def __init__(self, config: RunConfig, data_parallel_size: int, pad_token_id: int) -> None:
        self._config = config
        self._replicas = data_parallel_size
        self._pad_token_id = pad_token_id

    def batch(self, trajectories: Sequence[ScoredTrajectory]) -> TrainingBatch:
        """All trajectories of a step, in minibatches of whole groups.

        Raises:
            DataError: fewer sequences than replicas in a minibatch, or one longer than the token budget.
        """
        replicas: list[list[list[PackedTrajectory]]] = [[] for _ in range(self._replicas)]
        denominators = []
        for minibatch in split_by_group(trajectories, self._config.algorithm.minibatches):
            denominators.append(self._weigh(minibatch))
            for replica, packs in zip(replicas, self._pack(minibatch), strict=True):
                replica.append(packs)
        packs = [pack for replica in replicas for minibatch in replica for pack in minibatch]
        return TrainingBatch(
            replicas, denominators, sum(p.packed_seq_len for p in packs), sum(t.total_len for t in trajectories)
        )

    def _weigh(self, minibatch: Sequence[ScoredTrajectory]) -> float:
        """Set every sequence's token weight; the denominator covers the whole optimizer step, before any packing."""
        reduction = self._config.algorithm.reduction
        counts = [int(trajectory.loss_mask.sum()) for trajectory in minibatch]
        groups = [trajectory.group_id for trajectory in minibatch]
        weights = token_weights(reduction, counts, groups, self._config.algorithm.constant_length)
        for trajectory, weight in zip(minibatch, weights, strict=True):
            trajectory.token_weight = weight
        return step_denominator(reduction, counts, groups)

    def _pack(self, minibatch: Sequence[ScoredTrajectory]) -> list[list[PackedTrajectory]]:
        budget = self._config.trainer.target_tokens_per_batch
        if len(minibatch) < self._replicas:
            raise DataError(
                f"a minibatch has {len(minibatch)} sequences for {self._replicas} data-parallel replicas; raise "
                "rollout.prompts_per_step or lower algorithm.minibatches or trainer.parallel.data"
            )
        context = self._config.trainer.parallel.context
        lengths = [padded_length(t.total_len, context) for t in minibatch]
        for trajectory, length in zip(minibatch, lengths, strict=True):
            if length > budget:
                raise DataError(
                    f"sequence {trajectory.sequence_id} takes {length} tokens of a micro-batch (padding for "
                    f"trainer.parallel.context={context} included), more than "
                    f"trainer.target_tokens_per_batch={budget}; raise that, or lower the limits of prompt and response"
                )
        partitions = partition_by_tokens(lengths, budget, self._replicas, costs=self._costs(lengths))
        packs = [
            [pack_sequences([minibatch[i] for i in indices], pad_token_id=self._pad_token_id) for indices in replica]
            for replica in partitions
        ]
        return fill_to_equal_counts(packs)

    def _costs(self, lengths: Sequence[int]) -> list[float] | None:
        """What replicas are balanced by; none means tokens."""
        if self._config.trainer.balance == "tokens":
            return None
        model = self._dimensions
        attention = model.num_heads * model.head_dim
        return training_flops(lengths, attention, model.active_parameters, model.num_layers)

    @cached_property
    def _dimensions(self) -> ModelDimensions:
        return ModelDimensions.from_checkpoint(self._config.model.path)


def split_by_group(trajectories: Sequence[ScoredTrajectory], parts: int) -> list[list[ScoredTrajectory]]:
    """Whole groups, in order of appearance, in ``parts`` minibatches whose sizes differ by at most one group."""
    by_group: dict[int, list[ScoredTrajectory]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.group_id, []).append(trajectory)
    groups = list(by_group.values())
    if len(groups) < parts:
        raise DataError(f"{len(groups)} groups cannot be split into algorithm.minibatches={parts}; lower it")
    bounds = [len(groups) * part // parts for part in range(parts + 1)]
    return [[trajectory for group in groups[start:end] for trajectory in group] for start, end in pairwise(bounds)]


def fill_to_equal_counts(replicas: list[list[PackedTrajectory]]) -> list[list[PackedTrajectory]]:
    """Pipelines and collectives need equal micro-batch counts: fill with zero-weight packs, never drop or repeat.

    A replica may have no pack of its own; one must have.
    """
    most = max(len(packs) for packs in replicas)
    like = next(packs[0] for packs in replicas if packs)
    return [
        packs + [zero_weight_pack(packs[0] if packs else like) for _ in range(most - len(packs))] for packs in replicas
    ]
