"""The interface of a trainer backend: one rank, and every collective operation on it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from slime_like.config import RunConfig
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.interfaces.weights import WeightBucket
from slime_like.plugins.entry_points import BACKEND_GROUP, load_installed
from slime_like.trajectory import GRPOStats, PackedTrajectory


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Placement of one trainer rank: its rank, its device and the rendezvous.

    ``local_rank`` is the index of its device among those that its process can see. ``ranks_on_node`` share its node's
    cores; by default all ranks. ``store`` is a file for torch's ``FileStore``, where all ranks are on one host and meet
    without a port. Names of their keys begin with ``key``, which is random.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    ranks_on_node: int | None = None
    store: Path | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A rank's place on every parallel axis, and each axis' size where others need it."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    data_size: int


@dataclass(slots=True)
class ScoredLogprobs:
    """(R,) float32 response logprobs and entropies of one pack, in the pack's own order."""

    logprobs: Tensor
    entropy: Tensor


class Planner(Protocol):
    """Estimates of a backend's ranks on GPUs, computed in this process without touching a device."""

    def rank_kinds(self, config: RunConfig) -> list[RankKind]:
        """Group the layout's ranks by what they hold and do; every rank belongs to one kind."""

    def estimate(self, config: RunConfig, rank: int) -> RankEstimate:
        """Memory, work and traffic of one rank. Needs ``config.json`` of ``config.model.path`` alone.

        Parameters, gradients and optimizer state are exact.
        """


class PendingSave(Protocol):
    """One rank's part of a save that was started."""

    def is_written(self) -> bool:
        """Return whether this rank has written its part. Not collective; never waits.

        Raises:
            CheckpointError: it could not.
        """

    def finish(self) -> None:
        """Wait for every rank's part, at most ``trainer.step_timeout_s``, and make the directory a whole save."""


class TrainerBackend(Protocol):
    """One trainer rank. Every method is collective: all ranks call it, in the same order.

    Errors: ``TrainerError`` names the rank and the phase. A non-finite loss or gradient norm raises; it never updates.
    """

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None: ...

    @staticmethod
    def planner() -> Planner:
        """Estimates for ``slime-like plan``; a backend without this method can train and not be planned."""

    def setup(self) -> RankCoordinates:
        """Meet the other ranks, build this rank's shard, load ``config.model.path``."""

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        """Set up as ``setup`` does, without gradients, optimizer and reference; ``score`` and exports may follow.

        Args:
            checkpoint: directory that ``save`` wrote, under any layout, to take the weights from; ``config.model.path``
                then gives the dimensions only and needs no weights. None takes the weights from there, too.
        """

    def begin_step(self, denominator: float | None = None, tokens: int | None = None) -> None:
        """Zero the gradients and the step's sums.

        Both arguments are needed only where the objective has a term with another denominator
        (``algorithm.moe_aux_loss_coef``), whose share in the gradient must be right while it is accumulated.

        Args:
            denominator: what ``finish_step`` will be given.
            tokens: real tokens of this replica's packs in the whole step (``algorithms.packing.real_tokens``).
        """

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        """Forward and backward of one window. Windows have the same number of micro-batches on every rank.

        Every context- and model-parallel rank of a replica is given the same full packs and takes its part. They lie
        on the host, where they are checked and cut: the host need not wait for a device then.
        Gradients are those of ``sum(token_weights * per_token_loss)``: nothing is divided yet.
        ``last`` says that no window of this step follows: communication may then start before ``finish_step``.
        Where ``algorithm.scores_policy`` is false, a pack without old logprobs is given those of this very pass.
        """

    def finish_step(self, denominator: float) -> GRPOStats | None:
        """Reduce gradients, scale by ``1 / denominator``, clip, step the optimizer and the schedule.

        Returns the step's metrics on the ranks of the last pipeline stage, ``None`` elsewhere.
        """

    def score(
        self, micro_batches: Sequence[PackedTrajectory], weights: Literal["policy", "reference"] = "policy"
    ) -> list[ScoredLogprobs] | None:
        """Response logprobs and entropy of every pack, without gradient, at each sequence's own temperature.

        The result is whole on every rank of the last pipeline stage, ``None`` elsewhere.
        """

    def export_weights(self) -> Iterator[WeightBucket]:
        """Hugging-Face-named buckets of at most ``config.sync.bucket_mb``.

        Collective inside the tensor- and expert-parallel groups of a stage: all their ranks exhaust it in step. The
        one that sends yields tensors, those that only take part in its gathers yield empty buckets, others nothing.
        """

    def export_gradients(self, denominator: float) -> Iterator[WeightBucket]:
        """End a step without an update: yield its gradients, as ``export_weights`` gives weights, in float32.

        Reduced and divided by ``denominator``, not clipped. Nothing is updated: the next step starts from zero.
        """

    def export_hf(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint (sharded safetensors, index, config, tokenizer)."""

    def save(self, directory: Path) -> None:
        """Write this model, optimizer, scheduler and random state; the caller owns naming and atomicity."""

    def start_save(self, directory: Path) -> PendingSave:
        """Start a save of the present state, whose files may be written while training continues.

        Used with ``checkpoint.async_save``. The pending save is finished before the next one starts.
        """

    def load(self, directory: Path) -> None: ...

    def save_weights(self, directory: Path) -> None:
        """Write the weights alone, for ``load_weights`` and ``setup_for_scoring``."""

    def load_weights(self, directory: Path, weights: Literal["policy", "reference"]) -> None:
        """Read the weights that ``save`` or ``save_weights`` wrote, under any layout.

        Into the policy, for a trainer that only scores, or into what ``score`` takes for the reference: the policy
        then stays as it is.
        """

    def offload(self, keep_weights: bool = False) -> None:
        """Move gradients, optimizer state and, unless ``keep_weights``, weights to host memory; may be repeated."""

    def onload(self) -> None: ...

    def shutdown(self) -> None:
        """Leave the process groups."""


def load_backend(name: str) -> type[TrainerBackend]:
    """The trainer class registered as ``name``.

    Raises:
        ConfigError: no such entry point; the message lists the known ones.
    """
    return load_installed(BACKEND_GROUP, name, "trainer.backend")
