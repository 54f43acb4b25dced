"""Packing of scored trajectories into micro-batches for every data-parallel replica, as a whole step or in windows."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

from slime_like.algorithms.losses.loss import find_policy
from slime_like.algorithms.packing.pack import pack_sequences, zero_weight_pack
from slime_like.algorithms.packing.partition import (
    Partition,
    partition_by_tokens,
    partition_full_batches,
    training_flops,
)
from slime_like.algorithms.packing.prefixes import Bundle, make_bundles, split_bundles
from slime_like.algorithms.reduction import step_denominator, token_weights
from slime_like.config import AlgorithmConfig, ModelConfig, TrainerConfig
from slime_like.data.token_rows import TokenBudget
from slime_like.errors import ConfigError, DataError, SlimeLikeError
from slime_like.models.dimensions import ModelDimensions
from slime_like.system.words import pluralize
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory, Trajectory

Window = list[list[PackedTrajectory]]
"""Micro-batches as [data-parallel replica][micro-batch], with the same count for every replica."""

_FEWEST_PER_STAGE = 4
"""Minimum number of micro-batches in a window per pipeline stage."""

# Windows this long keep a pipeline's bubble small and average out pack lengths over replicas.
_PACKS_PER_STAGE, _FEWEST_PACKS = 4, 8


@dataclass(slots=True)
class TrainingBatch:
    """Input of the trainers for one training step.

    Attributes:
        replicas: [data-parallel replica][minibatch][micro-batch], with the same counts for every replica.
        denominators: number of tokens, rollouts or groups of each minibatch's optimizer step.
        tokens: number of computed and shared tokens.
    """

    replicas: list[list[list[PackedTrajectory]]]
    denominators: list[float]
    tokens: "PackTokens"


@dataclass(frozen=True, slots=True)
class PackTokens:
    """Token counts of packs: computed tokens, including padding and fillers, and tokens that were shared instead."""

    computed: int = 0
    shared: int = 0

    @classmethod
    def of(cls, packs: Iterable[PackedTrajectory]) -> Self:
        figures = [(pack.packed_seq_len - pack.shared_tokens, pack.shared_tokens) for pack in packs]
        return cls(*map(sum, zip((0, 0), *figures, strict=True)))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.computed + other.computed, self.shared + other.shared)


class ExperienceBatcher:
    """Batcher that packs by ``trainer.target_tokens_per_batch`` and balances replicas by ``trainer.balance``."""

    def __init__(
        self, algorithm: AlgorithmConfig, trainer: TrainerConfig, model: ModelConfig, replicas: int, pad_token_id: int
    ) -> None:
        self._algorithm = algorithm
        self._trainer = trainer
        self._model = model
        self._replicas = replicas
        self._pad_token_id = pad_token_id

    def batch(self, trajectories: Sequence[ScoredTrajectory], by_source: bool = False) -> TrainingBatch:
        """Pack all trajectories of a step into minibatches of whole groups.

        Args:
            by_source: whether each micro-batch has sequences of only one source.

        Raises:
            DataError: there are fewer groups than minibatches, or a sequence is over the token budget.
        """
        replicas: list[list[list[PackedTrajectory]]] = [[] for _ in range(self._replicas)]
        denominators = []
        for minibatch in split_by_group(trajectories, self._algorithm.minibatches):
            self.weigh(minibatch)
            denominators.append(self.denominator(minibatch))
            for replica, packs in zip(replicas, self.pack_all(minibatch, by_source=by_source), strict=True):
                replica.append(packs)
        every = (pack for replica in replicas for minibatch in replica for pack in minibatch)
        return TrainingBatch(replicas, denominators, PackTokens.of(every))

    def weigh(self, groups: Sequence[ScoredTrajectory]) -> None:
        """Set the token weight of every sequence of whole groups.

        Raises:
            ConfigError: a rollout has several rows, and the objective has a per-sequence ratio.
        """
        algorithm = self._algorithm
        counts, group_ids, rollout_ids = _loss_tokens(groups)
        if len(set(rollout_ids)) < len(rollout_ids):
            require_token_ratios(algorithm)
        weights = token_weights(algorithm.reduction.name, counts, group_ids, rollout_ids, **algorithm.reduction.options)
        for trajectory, weight in zip(groups, weights, strict=True):
            trajectory.token_weight = weight

    def denominator(self, minibatch: Sequence[ScoredTrajectory]) -> float:
        """Compute the divisor of the whole optimizer step's sums. It does not depend on the packs.

        Raises:
            SlimeLikeError: no token carries loss.
        """
        counts, groups, rollouts = _loss_tokens(minibatch)
        if not any(counts):
            raise SlimeLikeError(
                f"no token of {pluralize(len(counts), 'sample')} carries loss",
                code="no-loss-tokens",
                who="optimizer step",
                remedy="check that answers are not empty and that agents call the model",
            )
        reduction = self._algorithm.reduction
        return step_denominator(reduction.name, counts, groups, rollouts, **reduction.options)

    def pack_full(self, waiting: Sequence[ScoredTrajectory]) -> tuple[Window, list[ScoredTrajectory]]:
        """Return (window of full micro-batches, sequences left for later). The window may be empty.

        A pipeline's window has at least ``4 * trainer.parallel.pipeline`` micro-batches, to keep the bubble small.
        """
        parallel, budget = self._trainer.parallel, self._trainer.target_tokens_per_batch
        found = bundles_of(waiting, self._trainer)
        tokens = [bundle.tokens for bundle in found]
        partition = _of_sequences(partition_full_batches(tokens, budget, self._replicas), found)
        rounds = len(partition[0])
        fewest = _FEWEST_PER_STAGE * parallel.pipeline if parallel.pipeline > 1 else 1
        rounds = rounds - rounds % parallel.pipeline if rounds >= fewest else 0
        sent = [replica[:rounds] for replica in partition]
        gone = {index for replica in sent for members in replica for index in members}
        return self._packed(waiting, sent), [t for index, t in enumerate(waiting) if index not in gone]

    def pack_all(self, sequences: Sequence[Trajectory], by_source: bool = False) -> Window:
        """Pack all sequences in one window, balanced over replicas. Replicas without a sequence get fillers.

        Args:
            sequences: at least one; failures may leave fewer than there are replicas.
            by_source: whether each micro-batch has only one source, and all replicas have equal counts of each.

        Raises:
            DataError: a sequence is over the token budget.
        """
        budget, costs = self._trainer.target_tokens_per_batch, self._costs
        parts, window = defaultdict[str | None, list[Trajectory]](list), Window([] for _ in range(self._replicas))
        for sequence in sequences:
            parts[sequence.source if by_source else None].append(sequence)
        for part in parts.values():
            found = split_bundles(self._replicas, bundles_of(part, self._trainer), costs)
            used, weights = min(self._replicas, len(found)), [bundle.cost(costs) for bundle in found]
            partition = partition_by_tokens([bundle.tokens for bundle in found], budget, used, costs=weights)
            full = self._packed(part, _of_sequences(partition, found))
            most = max(map(len, full))
            for replica, packs in enumerate(window):  # pipelines and collectives need equal micro-batch counts
                own = full[replica] if replica < used else []
                like = (own or full[0])[0]
                packs += [*own, *(zero_weight_pack(like) for _ in range(most - len(own)))]
        return window

    def _packed(self, sequences: Sequence[Trajectory], partition: Partition) -> Window:
        """Pack sequences by length. CPU attention processes neighbors of equal length together, in place."""
        options: Any = {"pad_token_id": self._pad_token_id, "sharing": self._trainer.share_prefixes or None}

        def pack(indices: Sequence[int]) -> PackedTrajectory:
            ordered = sorted((sequences[i] for i in indices), key=lambda each: each.total_len)
            return pack_sequences(ordered, **options)

        return [[pack(indices) for indices in replica] for replica in partition]

    def _costs(self, lengths: Sequence[int]) -> Sequence[float]:
        """Return the costs to balance replicas by."""
        if self._trainer.balance == "tokens":
            return lengths
        model = self._dimensions
        attention = model.num_heads * (model.head_dim + model.value_dim) // 2
        return training_flops(lengths, attention, model.active_parameters, model.attention_layers)

    @cached_property
    def _dimensions(self) -> ModelDimensions:
        return ModelDimensions.from_checkpoint(self._model.path)


class WindowStream:
    """Windows of one optimizer step, each with the micro-batches that are full when it is returned.

    Attributes:
        trajectories: all added trajectories, in order of arrival.
        tokens: token counts of the returned windows.
    """

    def __init__(self, batcher: ExperienceBatcher) -> None:
        self._batcher = batcher
        self._waiting: list[ScoredTrajectory] = []
        self.trajectories: list[ScoredTrajectory] = []
        self.tokens = PackTokens()

    def add(self, groups: Sequence[ScoredTrajectory], holds: bool = False) -> Window | None:
        """Add whole groups, or none. Return the window that is now full, if any.

        Args:
            holds: whether to hold back full micro-batches for a larger window.

        Raises:
            DataError: a sequence is over the token budget.
        """
        self._batcher.weigh(groups)
        self.trajectories += groups
        self._waiting += groups
        if holds:
            return None
        window, self._waiting = self._batcher.pack_full(self._waiting)
        return self._counted(window) if window[0] else None

    def finish(self) -> tuple[Window, float]:
        """Return (last window, denominator of the whole step). Never empty: the newest groups never fill a window.

        Raises:
            SlimeLikeError: nothing in the step carries loss.
        """
        return self._counted(self._batcher.pack_all(self._waiting)), self._batcher.denominator(self.trajectories)

    def _counted(self, window: Window) -> Window:
        self.tokens += PackTokens.of(pack for replica in window for pack in replica)
        return window


def require_token_ratios(algorithm: AlgorithmConfig) -> None:
    """Reject per-sequence ratios, including a custom loss that does not declare ``per_sequence``.

    The batcher calls this at the first rollout of several rows. Runs that expect such rollouts may call it earlier.

    Raises:
        ConfigError: with every setting that has such a ratio.
    """
    problems, name = list(algorithm.row_conflicts()), algorithm.loss.name
    try:  # a custom class may not declare that it is computed per token
        declared = ":" not in name or getattr(find_policy(name), "per_sequence", True) is False
    except ValueError as error:
        raise ConfigError([f"algorithm.loss: {error}"], code="several-rows") from error
    if not declared:
        problems.append(
            f"algorithm.loss={name}: the loss may need all tokens of a sequence together, but rollouts with several "
            "rows are trained row by row; set per_sequence = False in its class if it is computed per token"
        )
    if problems:
        raise ConfigError(problems, code="several-rows")


def _loss_tokens(trajectories: Sequence[ScoredTrajectory]) -> tuple[list[int], list[int], list[str]]:
    """Return (loss-carrying tokens, group, rollout) of every trajectory."""
    counts = [int(t.loss_mask.sum()) for t in trajectories]
    return counts, [t.group_id for t in trajectories], [t.rollout_id for t in trajectories]


def split_by_group(trajectories: Sequence[ScoredTrajectory], parts: int) -> list[list[ScoredTrajectory]]:
    """Split whole groups, in order of appearance, into ``parts`` minibatches that differ by at most one group."""
    by_group: dict[int, list[ScoredTrajectory]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.group_id, []).append(trajectory)
    groups = list(by_group.values())
    if len(groups) < parts:
        raise DataError(
            f"{pluralize(len(groups), 'group')} cannot be split into algorithm.minibatches={parts}",
            code="too-few-groups",
            remedy="lower algorithm.minibatches",
        )
    bounds = [len(groups) * part // parts for part in range(parts + 1)]
    return [[trajectory for group in groups[start:end] for trajectory in group] for start, end in pairwise(bounds)]


def window_tokens(trainer: TrainerConfig) -> int:
    """Return the best number of tokens per ``ModelRanks.score`` call: several full packs for every replica."""
    packs = max(_FEWEST_PACKS, _PACKS_PER_STAGE * trainer.parallel.pipeline)
    return trainer.target_tokens_per_batch * trainer.parallel.data * packs


def packs_per_request(trainer: TrainerConfig) -> int:
    """Return the fewest full packs per replica that keep all ranks busy: one, or several with a pipeline."""
    return _PACKS_PER_STAGE * trainer.parallel.pipeline if trainer.parallel.pipeline > 1 else 1


def bundles_of(sequences: Sequence[Trajectory], trainer: TrainerConfig) -> list[Bundle]:
    """Bundle the sequences that go into one micro-batch because they share prefixes, as far as the budget allows.

    Raises:
        DataError: a sequence does not fit a micro-batch.
    """
    padded = TokenBudget(trainer).padded_lengths(sequences)
    sharing = trainer.share_prefixes or None
    lengths = padded if sharing is None else [sequence.total_len for sequence in sequences]
    return make_bundles(sequences, lengths, sharing, trainer.target_tokens_per_batch)


def _of_sequences(partition: Partition, found: Sequence[Bundle]) -> Partition:
    """Replace indices of bundles with indices of sequences."""
    return [[[i for k in members for i in found[k].members] for members in replica] for replica in partition]
