"""The FSDP2 trainer: one object per rank, behind ``slime_like.interfaces.TrainerBackend``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from backends.common.hugging_face.directory import SHARD_BYTES, write_hf_directory
from backends.common.process.collectives import join_context_parts
from backends.common.process.rendezvous import prepare_processor
from backends.common.step.balance import BalanceLoss
from backends.common.step.objective import Objective
from backends.common.step.sums import StepSums, reduced_over_data, require_finite_losses, require_finite_norm
from backends.fsdp import checkpoint, offload, own_forward, parallel
from backends.fsdp.balance import Routers
from backends.fsdp.checkpoint_writer import CheckpointWriter
from backends.fsdp.micro_batch import BatchBuilder, MicroBatch
from backends.fsdp.model import LogprobModel, build, computes_alike
from backends.fsdp.optimizer import Optimizer
from backends.fsdp.parallel import Groups
from backends.fsdp.reference import ReferenceWeights, preserved_weights
from backends.fsdp.weights import checkpoint_shapes, export_buckets, load_hf_weights
from slime_like.checks.attention import attention_problems
from slime_like.checks.families import family_problems
from slime_like.checks.fsdp import fsdp_problems
from slime_like.checks.latent import latent_problems
from slime_like.checks.schedule import schedule_problems
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, TrainerError
from slime_like.interfaces import RankCoordinates, RankPlacement, ScoredLogprobs, WeightBucket
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import GRPOStats, PackedTrajectory

if TYPE_CHECKING:
    from backends.fsdp.converter import FsdpConverter
    from slime_like.interfaces.estimate import RankEstimate, RankKind


class FsdpTrainer:
    """One rank of an FSDP2 trainer. See ``TrainerBackend`` for the meaning of every method.

    Attributes:
        model: Hugging Face's model with a logprob head, sharded (after ``setup``).
        optimizer: AdamW on this rank's shards (after ``setup``).
        groups: this rank's process groups.
        dimensions: the model's sizes, from its checkpoint.
    """

    model: LogprobModel
    optimizer: Optimizer
    groups: Groups
    dimensions: ModelDimensions

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        self.config = config
        self.placement = placement
        self.device = torch.device("cpu")
        self._objective = Objective(config)
        self._reference: ReferenceWeights | None = None
        self._step = StepSums()
        self._pending_save: CheckpointWriter | None = None

    @staticmethod
    def check(config: RunConfig) -> list[str]:
        """Problems with this configuration that need neither device nor process group, each with a remedy."""
        problems = [*schedule_problems(config), *fsdp_problems(config), *attention_problems(config)]
        try:
            dimensions = ModelDimensions.from_checkpoint(config.model.path)
        except ConfigError as error:
            return problems + error.problems
        return [*problems, *family_problems(config, dimensions), *latent_problems(config.trainer, dimensions)]

    @staticmethod
    def rank_kinds(config: RunConfig) -> list[RankKind]:
        """All ranks of the layout, which hold and do the same."""
        from backends.fsdp.planning import estimate

        return estimate.rank_kinds(config)

    @staticmethod
    def estimate(config: RunConfig, rank: int) -> RankEstimate:
        """Memory, work and traffic of one rank on GPUs, without one."""
        from backends.fsdp.planning import estimate

        return estimate.estimate(config, rank)

    @staticmethod
    def converter() -> FsdpConverter:
        """What ``slime-like convert`` works with. Needs neither device nor process group."""
        from backends.fsdp.converter import FsdpConverter

        return FsdpConverter()

    # ------------------------------------------------------------------------------------------------------------ start
    def setup(self) -> RankCoordinates:
        """Meet the other ranks, build this rank's shard, load the checkpoint and the reference."""
        with self._phase("setup"):
            self._build()
            self._load_start()
            self._require_own_forward()
            self._load_reference()
            self.optimizer = Optimizer(self.config, self.model, self.device)
        return self.groups.coordinates

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        """Weights alone: neither gradients nor an optimizer nor a reference take memory."""
        with self._phase("setup"):
            self._build()
            if checkpoint is None:
                self._load_start()
            else:
                self._load_weights(checkpoint)
            self._require_own_forward()
            self.model.requires_grad_(False)
        return self.groups.coordinates

    def _build(self) -> None:
        """Join the other ranks and make this rank's shard, weights still unset."""
        problems = self.check(self.config) + self._machine_problems()
        if problems:
            raise ConfigError(problems)
        prepare_processor(self.config, self.placement)
        self.dimensions = ModelDimensions.from_checkpoint(self.config.model.path)
        self.groups = parallel.initialize(self.config, self.placement)
        self.device = parallel.device()
        self.model = build(self.config, self.groups, self.device)
        by_package = self.config.trainer.attention == "ring_flash_attn"
        self._builder = BatchBuilder(self.device, self.groups.context, by_package)

    def _machine_problems(self) -> list[str]:
        problems = []
        if torch.cuda.is_available() and self.config.model.dtype == "float32":
            problems.append("model.dtype=float32 cannot run on CUDA: its attention kernels are bfloat16; set bfloat16")
        by_package = self.config.trainer.attention == "ring_flash_attn"
        if by_package and torch.cuda.is_available() and find_spec("flash_attn") is None:
            problems.append(
                "trainer.attention=ring_flash_attn needs the package flash_attn on CUDA, which is not installed; "
                "pip install flash-attn, or use trainer.attention=allgather"
            )
        return problems

    def _load_start(self) -> None:
        weights = self.config.model.weights
        if weights is None:
            load_hf_weights(self.model, self.config.model.path, self.device)
        else:
            self._load_weights(weights / "trainer")

    def _load_weights(self, directory: Path) -> None:
        checkpoint.load_weights(directory, self.model, self.device)

    @torch.no_grad()
    def _require_own_forward(self) -> None:
        """Packed attention and chunked head against the model's own forward pass; every rank, together."""
        path, sizes = self.config.model.path, (self.dimensions.vocab_size, self.dimensions.attention_reach)
        pack = own_forward.probe(*sizes)
        ours, others = self._score([pack, own_forward.probe(*sizes, seed=1)])
        first = int(pack.response_lens[0])
        own_forward.require_separate(ours.logprobs, others.logprobs, first, self._dtype, path)
        own = []
        for index, (prompt, response) in enumerate(zip(pack.prompt_lens, pack.response_lens, strict=True)):
            start = int(pack.cu_seqlens[index])
            tokens = pack.tokens[start : start + int(prompt + response)].to(self.device)
            own.append(own_forward.response_logprobs(self.model.own_logits(tokens), tokens, int(prompt)))
        self.model.shard_weights()
        own_forward.require_same(ours.logprobs, torch.cat(own), self._dtype, path)

    def _load_reference(self) -> None:
        if not self.config.reference_in_trainer:
            return
        path = self.config.reference.path
        if path is None or (path == self.config.model.path and self.config.model.weights is None):
            self._reference = ReferenceWeights(self.model)
            return
        if ModelDimensions.from_checkpoint(path) != self.dimensions or not computes_alike(path, self.config):
            raise ConfigError(
                [
                    f"reference.path={path}: its model has other dimensions, or other settings, than model.path; "
                    "use one of the same, or reference.placement=workers"
                ]
            )
        with preserved_weights(self.model):
            load_hf_weights(self.model, path, self.device)
            self._reference = ReferenceWeights(self.model)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A failed collective or kernel comes out as an error that names rank and phase."""
        try:
            yield
        except RuntimeError as error:
            alone = self.placement.world_size == 1
            hint = "" if alone else "; if a collective failed, another rank died or hung: its own message says why"
            raise TrainerError(f"rank {self.placement.rank}, {name}: {type(error).__name__}: {error}{hint}") from error

    # --------------------------------------------------------------------------------------------------------- training
    def begin_step(self, denominator: float | None = None, tokens: int | None = None) -> None:
        """Zero the gradients and the step's sums."""
        with self._phase("begin_step"):
            self.optimizer.zero_gradients()
            coefficient = self.config.algorithm.moe_aux_loss_coef
            balance = BalanceLoss.configured(coefficient, denominator, tokens, self.groups.replicas, self.device)
            self._step = StepSums(denominator, balance)

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        """Forward and backward of one window. Ranks sum their gradients in its last backward pass."""
        self._step.open_window(len(micro_batches), last)
        always = self.config.trainer.fsdp.accumulate == "sharded"
        with self._phase("accumulate"):
            for index, pack in enumerate(micro_batches):
                self.model.sum_gradients(always or index + 1 == len(micro_batches))
                self._loss(self._batch(pack, self._step.balance)).backward()

    def _batch(self, pack: PackedTrajectory, balance: BalanceLoss | None = None) -> MicroBatch:
        """This rank's part of a pack whose sequences all layers see whole."""
        reach = self.dimensions.attention_reach
        if reach is not None and pack.max_seqlen > reach:
            raise TrainerError(
                f"a sequence has {pack.max_seqlen} tokens, but layers of {self.config.model.path} attend to {reach} at "
                "most (sliding_window or attention_chunk_size), which packed attention does not compute; train on "
                "shorter ones"
            )
        return self._builder.build(pack, balance)

    def _loss(self, batch: MicroBatch) -> Tensor:
        """The pack's weighted sum and, behind it, its share of the routers' loss."""
        scored, *routers = self._forward(batch, routers=batch.routed is not None)
        logprobs, entropy = self._whole(batch, scored)
        loss = self._objective.add(self._step, batch.given, batch.pack, logprobs, entropy)
        if batch.routed is None:
            return loss
        chosen = Routers.of(self.dimensions, list(self.model.kept_by_name().values()))
        return loss + chosen.balance_loss(routers, batch.routed, self.groups.context)

    def _forward(self, batch: MicroBatch, routers: bool) -> tuple[Tensor, ...]:
        shard = batch.shard
        result: tuple[Tensor, ...] = self.model(
            shard.tokens, shard.position_ids, batch.boundaries, batch.responses, routers
        )
        return result

    def _whole(self, batch: MicroBatch, scored: Tensor) -> tuple[Tensor, Tensor]:
        """The pack's (R,) values from this context rank's part, differentiable."""
        part = torch.stack([batch.shard.scatter(scored[0]), batch.shard.scatter(scored[1])])
        logprobs, entropy = join_context_parts(part, self.groups.context)
        return logprobs, entropy

    def finish_step(self, denominator: float) -> GRPOStats | None:
        """Scale gradients by ``1 / denominator``, clip, step the optimizer and the schedule."""
        self._step.require_denominator(denominator)
        with self._phase("finish_step"):
            require_finite_losses(self._step, self.device)
            self.finalize_gradients(denominator)
            norm = self.optimizer.gradient_norm()
            require_finite_norm(norm)
            self.optimizer.update(norm)
            self.optimizer.zero_gradients()
            self.model.shard_weights()
            return self._statistics(denominator, norm)

    def finalize_gradients(self, denominator: float) -> None:
        """Gradients are summed over all ranks already: divide them once."""
        self.optimizer.scale(1.0 / denominator)

    def _statistics(self, denominator: float, norm: float) -> GRPOStats:
        balance = self._step.balance
        if self._step.sums is None:
            raise TrainerError(f"rank {self.placement.rank}, finish_step: the step had no window; accumulate one first")
        sums = reduced_over_data(self._step.sums, self.groups.replicas)
        stats = sums.to_stats(denominator, norm, self.optimizer.learning_rate)
        if balance is None:
            return stats
        return replace(stats, moe_aux_loss=balance.mean(len(self.dimensions.expert_layers), self.device))

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
                "algorithm.kl_reward_coef too; set one above 0"
            )
        with self._reference.in_place():
            return self._score(micro_batches)

    @torch.no_grad()
    def _score(self, micro_batches: Sequence[PackedTrajectory]) -> list[ScoredLogprobs]:
        scored = []
        with self._phase("score"):
            for pack in micro_batches:
                batch = self._batch(pack)
                (part,) = self._forward(batch, routers=False)
                logprobs, entropy = self._whole(batch, part)
                scored.append(ScoredLogprobs(logprobs.float(), entropy.float()))
            self.model.shard_weights()
        return scored

    # ---------------------------------------------------------------------------------------------------------- weights
    def export_weights(self) -> Iterator[WeightBucket]:
        """Hugging-Face-named buckets of at most ``sync.bucket_mb``."""
        return self._buckets(self._bucket_bytes)

    def export_gradients(self, denominator: float) -> Iterator[WeightBucket]:
        """The step's finished gradients under Hugging Face's names; nothing is updated."""
        self._step.require_denominator(denominator)
        with self._phase("finalize_gradients"):
            self.finalize_gradients(denominator)
        own = self.optimizer.gradients()
        return export_buckets(self.model, torch.float32, self._bucket_bytes, self.device, own)

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.sync.bucket_mb * 2**20)

    def _buckets(self, nbytes: int) -> Iterator[WeightBucket]:
        return export_buckets(self.model, self._dtype, nbytes, self.device)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.model.dtype)
        return dtype

    def export_hf(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint."""
        with self._phase("writing the Hugging Face model"):
            names = checkpoint_shapes(self.model)
            source = self.config.model.path
            write_hf_directory(self._buckets(SHARD_BYTES), names, source, directory, 0, self._dtype, self.device)

    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and random state by torch's distributed checkpointing."""
        with self._phase("save"):
            checkpoint.save_checkpoint(directory, self.config, self.model, self.optimizer, self.groups, self.device)

    def start_save(self, directory: Path) -> None:
        """As ``save``, from a snapshot in host memory that a thread writes while the trainer goes on."""
        with self._phase("save"):
            self._pending_save = checkpoint.start_checkpoint(
                directory, self.config, self.model, self.optimizer, self.groups, self.device
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
        """Read what ``save`` wrote, on as many ranks or on others."""
        with self._phase("load"):
            checkpoint.load_checkpoint(directory, self.config, self.model, self.optimizer, self.groups, self.device)

    def save_weights(self, directory: Path) -> None:
        """Write the weights alone."""
        with self._phase("save"):
            checkpoint.save_weights(directory, self.model, self.groups, self.device)

    def load_weights(self, directory: Path, weights: Literal["policy", "reference"]) -> None:
        """Read weights into the policy of a trainer that only scores, or into the reference."""
        with self._phase("load"):
            if weights == "policy":
                self._load_weights(directory)
                return
            with preserved_weights(self.model):
                self._load_weights(directory)
                self._reference = ReferenceWeights(self.model)

    def offload(self, keep_weights: bool = False) -> None:
        """Move gradients, optimizer state and weights to host memory (on a CPU they are there already)."""
        offload.to_host(self.model, self.optimizer, keep_weights, self.config.trainer.optimizer.offload)

    def onload(self) -> None:
        """Move them back to the device."""
        offload.to_device(self.model, self.optimizer, self.device, self.config.trainer.optimizer.offload)

    def shutdown(self) -> None:
        """Leave the process groups."""
        parallel.leave()
