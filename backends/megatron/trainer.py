"""The Megatron-core trainer: one object per rank, behind ``slime_like.interfaces.TrainerBackend``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from backends.common.process.rendezvous import prepare_processor
from backends.common.step.balance import BalanceLoss
from backends.common.step.objective import Objective
from backends.common.step.sums import StepSums, reduced_over_data, require_finite_losses, require_finite_norm
from backends.megatron import checkpoint, conversion, offload, parallel
from backends.megatron.activations import ActivationOffload
from backends.megatron.attention_choice import attention_of, machine_problems
from backends.megatron.checkpoint import load_weights, save_weights
from backends.megatron.checkpoint_writer import CheckpointWriter
from backends.megatron.cpu_runtime import megatron_runtime
from backends.megatron.head import LogprobModel
from backends.megatron.micro_batch import BatchBuilder, MicroBatch
from backends.megatron.model import build_chunks
from backends.megatron.optimizer import Optimizer, wrap_for_data_parallel
from backends.megatron.overlap import Communication
from backends.megatron.reference import ReferenceWeights, preserved_weights
from backends.megatron.rotary import Rotary, inverse_frequencies
from backends.megatron.schedule import Schedule
from slime_like.checks.families import family_problems
from slime_like.checks.latent import latent_problems
from slime_like.checks.layout import layout_problems
from slime_like.checks.offload import offload_problems
from slime_like.checks.schedule import schedule_problems
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, TrainerError
from slime_like.interfaces import RankCoordinates, RankPlacement, ScoredLogprobs, WeightBucket
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import GRPOStats, PackedTrajectory

if TYPE_CHECKING:
    from backends.megatron.conversion.offline.converter import MegatronConverter
    from slime_like.interfaces.estimate import RankEstimate, RankKind


class MegatronTrainer:
    """One rank of a Megatron-core trainer. See ``TrainerBackend`` for the meaning of every method.

    Attributes:
        chunks: this rank's model chunks, without their data-parallel wrapping (after ``setup``).
        wrapped: the same chunks inside Megatron's DDP.
        optimizer: AdamW and its schedule.
        dimensions: the model's sizes, from its checkpoint.
        coordinates: this rank's place on every axis.
    """

    chunks: list[LogprobModel]
    wrapped: list[DistributedDataParallel]
    optimizer: Optimizer
    dimensions: ModelDimensions
    coordinates: RankCoordinates

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        self.config = config
        self.placement = placement
        self.runtime = megatron_runtime()
        self._objective = Objective(config)
        self._reference: ReferenceWeights | None = None
        self._step = StepSums()
        self._communication = Communication([])
        self._pending_save: CheckpointWriter | None = None

    @staticmethod
    def check(config: RunConfig) -> list[str]:
        """Problems with this configuration that need neither device nor process group, each with a remedy."""
        problems = [*schedule_problems(config), *offload_problems(config)]
        try:
            dimensions = ModelDimensions.from_checkpoint(config.model.path)
            if foreign := [*family_problems(config, dimensions)]:
                return problems + foreign
            inverse_frequencies(dimensions)
        except ConfigError as error:
            return problems + error.problems
        problems += latent_problems(config.trainer, dimensions)
        return problems + layout_problems(config.trainer.parallel, dimensions)

    @staticmethod
    def rank_kinds(config: RunConfig) -> list[RankKind]:
        """All ranks of the layout, those that hold and do the same together."""
        from backends.megatron.planning import estimate

        return estimate.rank_kinds(config)

    @staticmethod
    def estimate(config: RunConfig, rank: int) -> RankEstimate:
        """Memory, work and traffic of one rank on GPUs, without one."""
        from backends.megatron.planning import estimate

        return estimate.estimate(config, rank)

    @staticmethod
    def converter() -> MegatronConverter:
        """What ``slime-like convert`` works with. Needs neither device nor process group."""
        from backends.megatron.conversion.offline.converter import MegatronConverter

        return MegatronConverter()

    # ------------------------------------------------------------------------------------------------------------ start
    def setup(self) -> RankCoordinates:
        """Meet the other ranks, build this rank's shard, load the checkpoint and the reference."""
        with self._phase("setup"):
            self._build()
            self._load_start(self.config.model.weights)
            self._load_reference()
            self.wrapped = wrap_for_data_parallel(self.config, self.chunks)
            self.optimizer = Optimizer(self.config, self.wrapped)
            activations = ActivationOffload(self.chunks) if self.config.trainer.activation_offload else None
            self._schedule = Schedule(self.wrapped, self._batch_builder(), self.config.trainer.parallel, activations)
            self._communication = Communication(self.wrapped)
            self._communication.attach()
        return self.coordinates

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        """Weights alone: neither gradient buffers nor an optimizer nor a reference take memory."""
        with self._phase("setup"):
            self._build()
            if checkpoint is None:
                self._load_start(self.config.model.weights)
            else:
                load_weights(checkpoint, self.chunks)
            self._schedule = Schedule(self.chunks, self._batch_builder(), self.config.trainer.parallel)
        return self.coordinates

    def _load_start(self, weights: Path | None) -> None:
        if weights is None:
            conversion.load_hf_weights(self.chunks, self.config.model.path, self.dimensions)
        else:
            load_weights(weights / "trainer", self.chunks)

    def _build(self) -> None:
        """Join the other ranks and make this rank's chunks, weights still unset."""
        problems = self.check(self.config) + machine_problems(self.config, torch.cuda.is_available())
        if torch.cuda.is_available() and self.config.model.dtype == "float32":
            problems.append("model.dtype=float32 cannot run on CUDA: its attention kernels are bfloat16; set bfloat16")
        if problems:
            raise ConfigError(problems)
        prepare_processor(self.config, self.placement)
        self.dimensions = ModelDimensions.from_checkpoint(self.config.model.path)
        self.coordinates = parallel.initialize(self.config, self.placement)
        self.chunks = build_chunks(self.config, self.dimensions)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return next(self.chunks[0].parameters()).device

    @property
    def _replicas(self) -> dist.ProcessGroup:
        """The data-parallel group, without context ranks."""
        return parallel_state.get_data_parallel_group(with_context_parallel=False)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Megatron's runtime; a failed collective or kernel comes out as an error that names rank and phase."""
        try:
            with self.runtime:
                yield
        except RuntimeError as error:
            alone = self.placement.world_size == 1
            hint = "" if alone else "; if a collective failed, another rank died or hung: its own message says why"
            raise TrainerError(f"rank {self.placement.rank}, {name}: {type(error).__name__}: {error}{hint}") from error

    def _load_reference(self) -> None:
        if not self.config.reference_in_trainer:
            return
        path = self.config.reference.path
        if path is None or (path == self.config.model.path and self.config.model.weights is None):
            self._reference = ReferenceWeights(self.chunks)
            return
        if ModelDimensions.from_checkpoint(path) != self.dimensions:
            raise ConfigError(
                [f"reference.path={path}: its model has other dimensions than model.path; use one of the same sizes"]
            )
        with preserved_weights(self.chunks):
            conversion.load_hf_weights(self.chunks, path, self.dimensions)
            self._reference = ReferenceWeights(self.chunks)

    def _batch_builder(self) -> BatchBuilder:
        layout = self.config.trainer.parallel
        return BatchBuilder(
            device=self.device,
            dtype=getattr(torch, self.config.model.dtype),
            rotary=Rotary.of(self.dimensions, self.device),
            context_group=parallel_state.get_context_parallel_group(),
            attention=attention_of(self.config.trainer, self.dimensions, torch.cuda.is_available()),
            sequence_group=parallel_state.get_tensor_model_parallel_group() if layout.sequence else None,
        )

    # --------------------------------------------------------------------------------------------------------- training
    def begin_step(self, denominator: float | None = None, tokens: int | None = None) -> None:
        """Zero the gradients and the step's sums."""
        with self._phase("begin_step"):
            self._communication.begin_step()
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
            self.optimizer.megatron.zero_grad()
            coefficient = self.config.algorithm.moe_aux_loss_coef
            balance = BalanceLoss.configured(coefficient, denominator, tokens, self._replicas, self.device)
            self._step = StepSums(denominator, balance)

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        """Forward and backward of one window through Megatron's schedule."""
        self._step.open_window(len(micro_batches), last)
        with self._phase("accumulate"), self._communication.window(last):
            self._schedule.train(micro_batches, self._micro_batch_loss, self._step.balance)

    def _micro_batch_loss(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return self._objective.add(self._step, batch.given, batch.pack, logprobs, entropy)

    def finish_step(self, denominator: float) -> GRPOStats | None:
        """Reduce gradients, scale by ``1 / denominator``, clip, step the optimizer and the schedule."""
        self._step.require_denominator(denominator)
        with self._phase("finish_step"):
            require_finite_losses(self._step, self.device)
            self.finalize_gradients(denominator)
            norm = self.optimizer.gradient_norm()
            require_finite_norm(norm)
            self.optimizer.update(norm)
            return self._statistics(denominator, norm)

    def _statistics(self, denominator: float, norm: float) -> GRPOStats | None:
        balance = self._step.balance
        balanced = None if balance is None else balance.mean(len(self.dimensions.expert_layers), self.device)
        if self._step.sums is None:
            return None
        stats = reduced_over_data(self._step.sums, self._replicas).to_stats(
            denominator, norm, self.optimizer.learning_rate
        )
        return stats if balanced is None else replace(stats, moe_aux_loss=balanced)

    def finalize_gradients(self, denominator: float) -> None:
        """Sum gradients over data and context ranks, of shared weights over their groups; scale by 1/denominator."""
        with self._phase("finalize_gradients"):
            self._communication.start_sums()
            finalize_model_grads(self.wrapped, None)
            for chunk in self.wrapped:
                chunk.scale_gradients(1.0 / denominator)

    # ---------------------------------------------------------------------------------------------------------- scoring
    def score(
        self, micro_batches: Sequence[PackedTrajectory], weights: Literal["policy", "reference"] = "policy"
    ) -> list[ScoredLogprobs] | None:
        """Response logprobs and entropy of every pack, by the very code that training runs, without gradient."""
        if weights == "policy":
            return self._score(micro_batches)
        if self._reference is None:
            raise TrainerError(
                f"rank {self.placement.rank}, score: no reference is loaded because algorithm.kl_coef is 0, and "
                "algorithm.kl_reward_coef too, or because reference.placement is workers; set one above 0, or "
                "placement: trainer"
            )
        self.settle_weights()
        with self._reference.in_place():
            return self._score(micro_batches)

    def _score(self, micro_batches: Sequence[PackedTrajectory]) -> list[ScoredLogprobs] | None:
        with self._phase("score"):
            scored = self._schedule.score(micro_batches)
        if scored is None:
            return None
        return [ScoredLogprobs(logprobs.float(), entropy.float()) for logprobs, entropy in scored]

    # ---------------------------------------------------------------------------------------------------------- weights
    def settle_weights(self) -> None:
        """Make every weight of this rank whole: with ``trainer.optimizer.overlap`` an update's may still be on its way.

        Every method here that reads weights does so itself. Collective.
        """
        with self._phase("gathering weights"):
            self._communication.settle_weights()

    def export_weights(self) -> Iterator[WeightBucket]:
        """Hugging-Face-named buckets of at most ``sync.bucket_mb``."""
        self.settle_weights()
        return conversion.export_buckets(self.chunks, self.dimensions, self._bucket_bytes)

    def export_gradients(self, denominator: float) -> Iterator[WeightBucket]:
        """The step's finished gradients under Hugging Face's names; nothing is updated."""
        self._step.require_denominator(denominator)
        self.finalize_gradients(denominator)
        with self._phase("gathering gradients"):
            self._communication.gather_gradients()
        return conversion.export_gradients(self.chunks, self.dimensions, self._bucket_bytes)

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.sync.bucket_mb * 2**20)

    def export_hf(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint."""
        self.settle_weights()
        conversion.save_hf(self.chunks, self.dimensions, self.config.model.path, directory)

    def save(self, directory: Path) -> None:
        """Write model, optimizer, scheduler and random state by Megatron's distributed checkpointing."""
        self.settle_weights()
        with self._phase("save"):
            checkpoint.save_checkpoint(directory, self.chunks, self.optimizer.megatron, self.optimizer.scheduler, {})

    def start_save(self, directory: Path) -> None:
        """As ``save``, from a snapshot in host memory that a thread writes while the trainer goes on."""
        self.settle_weights()
        with self._phase("save"):
            self._pending_save = checkpoint.start_checkpoint(
                directory, self.chunks, self.optimizer.megatron, self.optimizer.scheduler, {}
            )

    def is_save_written(self) -> bool:
        """Whether this rank's files are on disk."""
        return self._started_save().is_written()

    def finish_save(self) -> None:
        """Wait for every rank's files, then write what makes the checkpoint whole."""
        with self._phase("save"):
            self._started_save().finish(self.config.trainer.step_timeout_s)
        self._pending_save = None

    def _started_save(self) -> CheckpointWriter:
        if self._pending_save is None:
            raise TrainerError(f"rank {self.placement.rank}, save: no save was started; call start_save first")
        return self._pending_save

    def load(self, directory: Path) -> None:
        """Read what ``save`` wrote, under this layout or another."""
        self.settle_weights()
        with self._phase("load"):
            checkpoint.load_checkpoint(directory, self.chunks, self.optimizer.megatron, self.optimizer.scheduler)

    def save_weights(self, directory: Path) -> None:
        """Write the weights alone."""
        self.settle_weights()
        with self._phase("save"):
            save_weights(directory, self.chunks)

    def load_weights(self, directory: Path, weights: Literal["policy", "reference"]) -> None:
        """Read weights into the policy of a trainer that only scores, or into the reference."""
        if weights == "policy":
            with self._phase("load"):
                load_weights(directory, self.chunks)
            return
        self.settle_weights()
        with self._phase("load"), preserved_weights(self.chunks):
            load_weights(directory, self.chunks)
            self._reference = ReferenceWeights(self.chunks)

    def offload(self, keep_weights: bool = False) -> None:
        """Move gradients, optimizer state and weights to host memory (on a CPU they are there already)."""
        self.settle_weights()
        offload.to_host(self.wrapped, self.optimizer.megatron, keep_weights)

    def onload(self) -> None:
        """Move them back to the device."""
        offload.to_device(self.wrapped, self.optimizer.megatron)

    def shutdown(self) -> None:
        """Leave the process groups."""
        parallel.leave()
