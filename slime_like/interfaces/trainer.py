"""The interface of a trainer backend: one rank, and every collective operation on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from slime_like.config import RunConfig, TrainerConfig
from slime_like.config.roles import POLICY
from slime_like.interfaces.weights import WeightBucket, WeightExport
from slime_like.plugins.resolve import BACKEND_GROUP, load_installed
from slime_like.statistics import StepStats
from slime_like.trajectory import PackedTrajectory

if TYPE_CHECKING:
    from slime_like.interfaces.estimate import RankEstimate, RankKind


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Placement of one trainer rank: its number, device and rendezvous.

    ``local_rank`` is the index of its device among the devices its process can see. ``ranks_on_node`` ranks share the
    node's cores; by default all ranks do. If all ranks are on one host, ``store`` is a file for torch's ``FileStore``,
    so they meet without a port. Their keys' names begin with ``key``, which is random. ``role`` is the model whose
    weights the ranks' modules hold, a key of the run's ``roles``.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    ranks_on_node: int | None = None
    store: Path | None = None
    key: str = ""
    role: str = POLICY


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A rank's position on every parallel axis, and the size of the data axis."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    data_size: int


Scores = dict[str, Tensor]
"""A model's outputs for one pack, (R, ...) float32 in the pack's order, by the names of the fields that hold them."""


class Planner(Protocol):
    """Estimates of a backend's ranks on GPUs, computed in this process without touching a device."""

    def rank_kinds(self, trainer: TrainerConfig) -> list[RankKind]:
        """Group the layout's ranks by contents and work. Every rank belongs to one kind."""

    def estimate(self, config: RunConfig, rank: int, role: str = POLICY) -> RankEstimate:
        """Estimate memory, work and traffic of one rank, whose modules hold ``role``.

        Needs only ``config.json`` of ``config.model.path``.

        Parameters, gradients and optimizer state are exact.
        """


class PendingSave(Protocol):
    """One rank's part of a started save."""

    def is_written(self) -> bool:
        """Return whether this rank has written its part. Not collective; never waits.

        Raises:
            CheckpointError: the write failed.
        """

    def finish(self) -> None:
        """Wait for every rank's part, at most ``trainer.step_timeout_s``, and make the directory a whole save."""


class TrainerBackend(Protocol):
    """One trainer rank. Every method is collective: all ranks call it, in the same order.

    Errors: ``TrainerError`` names the rank and the phase. A non-finite loss or gradient norm raises and never updates.
    """

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None: ...

    @staticmethod
    def planner() -> Planner:
        """Return the estimates for ``slime-like plan``. A backend without this method can train but not be planned."""

    def setup(self) -> RankCoordinates:
        """Meet the other ranks, build this rank's shard, load ``config.model.path``."""

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        """Set up like ``setup``, but without gradients, optimizer and other roles. ``score`` and exports may follow.

        Args:
            checkpoint: directory written by ``save``, in any layout, to read the weights from; ``config.model.path``
                then gives only the dimensions and needs no weights. If None, it gives the weights, too.
        """

    def begin_step(self, denominator: float | None = None, tokens: int | None = None) -> None:
        """Zero the gradients and the step's sums.

        Both arguments are needed only if the objective has a term with another denominator
        (``algorithm.moe_aux_loss_coef``), whose share of the gradient must be correct during accumulation.

        Args:
            denominator: the value that ``finish_step`` will receive.
            tokens: real tokens of this replica's packs in the whole step (``algorithms.packing.real_tokens``).
        """

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        """Run forward and backward for one window. Windows have the same number of micro-batches on every rank.

        Every context- and model-parallel rank of a replica receives the same full packs and takes its part. Packs are
        on the host, where they are checked and split, so the host never has to wait for a device. Gradients are of
        ``sum(token_weights * per_token_loss)``: nothing is divided yet. ``last`` means that no other window of this
        step follows: communication may then start before ``finish_step``. If ``algorithm.scores_policy`` is false, a
        pack without old logprobs receives this pass's logprobs.
        """

    def finish_step(self, denominator: float) -> StepStats | None:
        """Reduce gradients, scale by ``1 / denominator``, clip, step the optimizer and the schedule.

        Returns the step's metrics on the ranks of the last pipeline stage, ``None`` elsewhere.
        """

    def score(self, micro_batches: Sequence[PackedTrajectory], role: str | None = None) -> list[Scores] | None:
        """Return each pack's scores, without gradient: ``role``'s outputs for every response token.

        Logprobs and entropies are at each sequence's temperature. By default, the modules' own role scores
        (``RankPlacement.role``). The result is whole on every rank of the last pipeline stage, ``None`` elsewhere.

        With ``algorithm.routing_replay: rollout``, the policy replays routes, which every pack must have if the role is
        named. With ``old``, a pass that names the policy gives packs the routes that their training passes replay.
        """

    def perturb_adapter(self, size: float | None) -> None:
        """Replace the adapter by random weights with outputs of about ``size``. ``None`` restores it exactly."""

    def export_weights(self) -> WeightExport:
        """Export buckets with Hugging Face names, each at most ``config.sync.bucket_mb``, and their manifest.

        Collective within a stage's tensor- and expert-parallel groups: all their ranks iterate in step. The sending
        rank yields tensors, ranks that only take part in its gathers yield empty buckets, others nothing.
        """

    def export_gradients(self, denominator: float) -> Iterator[WeightBucket]:
        """End a step without an update: yield its gradients in float32, like the buckets of ``export_weights``.

        They are reduced and divided by ``denominator``, but not clipped. The next step starts from zero.
        """

    def export_hf(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint (sharded safetensors, index, config, tokenizer)."""

    def save(self, directory: Path) -> None:
        """Write this model, optimizer, scheduler and random state. The caller handles naming and atomicity."""

    def start_save(self, directory: Path) -> PendingSave:
        """Start a save of the current state. Its files may be written while training continues.

        Used with ``checkpoint.async_save``. The pending save finishes before the next one starts.
        """

    def load(self, directory: Path) -> None: ...

    def save_weights(self, directory: Path) -> None:
        """Write only the weights, for ``load_weights`` and ``setup_for_scoring``."""

    def load_weights(self, directory: Path, role: str) -> None:
        """Read the weights of ``role``, written by ``save`` or ``save_weights``, in any layout.

        The modules' own role is for a trainer that only scores. Others leave the modules' weights unchanged.
        """

    def offload(self, keep_weights: bool = False) -> None:
        """Move gradients, optimizer state and, unless ``keep_weights``, weights to host memory. May be repeated."""

    def onload(self) -> None: ...

    def shutdown(self) -> None:
        """Leave the process groups."""


def load_backend(name: str) -> type[TrainerBackend]:
    """Return the trainer class registered as ``name``.

    Raises:
        ConfigError: no such entry point; the message lists the known ones.
    """
    return load_installed(BACKEND_GROUP, name, "trainer.backend")
