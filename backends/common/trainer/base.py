"""A trainer rank's start, step, scoring and transfer of its state, independent of what computes its model."""

import contextlib
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.kernels import choose_flash_attention
from backends.common.checkpoint.writing import CheckpointWriter
from backends.common.hugging_face.directory import to_checkpoint_layout
from backends.common.process.agreement import rank_error
from backends.common.process.rendezvous import allocator_problems, prepare_processor, use_expandable_segments
from backends.common.step.balance import Balance, BalanceLoss, ExpertLoads
from backends.common.step.objective import (
    LOSSES_OF_HEADS,
    StepSums,
    reduce_over_data,
    require_finite_losses,
    require_finite_norm,
)
from backends.common.step.packs import MicroBatch
from backends.common.step.routes import Replay
from backends.common.trainer.state import StepOptimizer, TrainerState
from slime_like.checks.packages import cpu_only_settings, fla_problem
from slime_like.config import RunConfig
from slime_like.config.roles import POLICY, ModelRole
from slime_like.errors import ConfigError, TrainerError
from slime_like.interfaces import (
    PendingSave,
    RankCoordinates,
    RankPlacement,
    Scores,
    TrainerBackend,
    WeightBucket,
    WeightExport,
)
from slime_like.models.dimensions import ModelDimensions
from slime_like.plugins.options import load_option
from slime_like.statistics import StepStats
from slime_like.system.heartbeat import beat
from slime_like.system.profiler import named_range
from slime_like.trajectory import PackedTrajectory


class TrainerBase(TrainerBackend):
    """The part of ``TrainerBackend`` that is the same for every backend. A backend builds, computes and sums.

    Attributes:
        models: this rank's models, one for each part of the pipeline.
        optimizer: AdamW and its schedule (in a trainer that trains).
        replicas: the data-parallel group, without context ranks.
    """

    state: TrainerState
    dimensions: ModelDimensions
    coordinates: RankCoordinates
    models: Sequence[Any]
    optimizer: StepOptimizer
    device: torch.device
    replicas: dist.ProcessGroup

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        self.config = config
        self.placement = placement
        self._started: CheckpointWriter | None = None
        self._role = config.roles[placement.role]
        self._loss: Any = LOSSES_OF_HEADS[self._role.head](config) if self._role.trained else None
        self._step, self._perturbed = StepSums(), contextlib.ExitStack()

    # ----------------------------------------------------------------------------------------- what a backend computes
    @abstractmethod
    def _machine_problems(self) -> list[str]:
        """List what this rank's machine lacks, each with a remedy."""

    @abstractmethod
    def _build(self) -> None:
        """Join the other ranks and create ``state`` without weights, ``coordinates``, ``device`` and ``replicas``."""

    @abstractmethod
    def _prepare_training(self) -> StepOptimizer:
        """Create what training needs in addition to loaded weights."""

    @abstractmethod
    def _prepare_scoring(self) -> None:
        """Create what scoring needs in addition to loaded weights."""

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Clear everything left by an earlier step."""

    @abstractmethod
    def finalize_gradients(self, denominator: float) -> None:
        """Make this rank's gradients the step's gradients: summed over ranks, divided by ``denominator``."""

    @abstractmethod
    def _router_biases(self) -> dict[int, Tensor]:
        """Return the biases of this rank's sigmoid routers, (E,) float32, by layer, as the model's memory."""

    @abstractmethod
    def _score(self, packs: Sequence[PackedTrajectory], replay: Replay | None) -> list[tuple[Tensor, ...]] | None:
        """Return the head's (R, ...) outputs for each pack, with the current weights."""

    # ----------------------------------------------------------------------------------------------------------- phases
    @property
    def runtime(self) -> contextlib.AbstractContextManager[None]:
        """Return a new context in which a phase runs."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Enter the backend's runtime. A failed collective or kernel becomes an error that names rank and phase."""
        try:
            with self.runtime, named_range(name):
                yield
        except RuntimeError as error:
            alone = self.placement.world_size == 1
            raise TrainerError(
                f"{type(error).__name__}: {error}",
                code="trainer-phase-failed",
                who=f"rank {self.placement.rank}",
                phase=name,
                remedy=""
                if alone
                else "if a collective failed, another rank died or hung: see the message of that rank",
            ) from error

    def settle_weights(self) -> None:
        """Make every weight whole if an update may be in progress, before weights are read. Collective."""

    @contextlib.contextmanager
    def _settled(self, phase: str) -> Iterator[None]:
        self.settle_weights()
        with self._phase(phase):
            yield

    # ------------------------------------------------------------------------------------------------------------ start
    def setup(self) -> RankCoordinates:
        """Meet the other ranks, build this rank's shard, load the checkpoint and the frozen roles."""
        with self._phase("setup"):
            self._open()
            self._load_start()
            for role in self.config.roles.held if self._role.name == POLICY else ():
                self._add_frozen(role)
            if self._role.name == POLICY and self.config.distillation.exact_coef > 0:
                given = self.config.distillation, self.config.model, self.device
                self.state.constants = load_option("teacher-heads")(self.models, *given)
            self.optimizer = self._prepare_training()
        return self.coordinates

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        with self._phase("setup"):
            self._open()
            self._load_start(checkpoint)
            self._prepare_scoring()
        return self.coordinates

    def _open(self) -> None:
        problems, on_cuda = self._machine_problems(), torch.cuda.is_available()
        mapped = self.config.engines_map_memory
        if on_cuda:
            problems += cpu_only_settings(self.config.model)
            problems += allocator_problems(self.config.sync.transport, mapped, os.environ)
        if problems:
            raise ConfigError(problems)
        if on_cuda:
            use_expandable_segments(mapped, os.environ)
            choose_flash_attention(self.config.trainer.attention_kernels, torch.cuda.get_device_capability())
        prepare_processor(self.config.trainer, self.placement)
        self.dimensions = ModelDimensions.from_checkpoint(self.config.model.path, self._role.head == "value")
        recurs = self.dimensions.attention.linear is not None
        if recurs and on_cuda and (problem := fla_problem(torch.cuda.get_device_capability())):
            warnings.warn(f"linear attention uses torch's operators, which are slower: {problem}", stacklevel=2)
        self._build()

    def _load_start(self, checkpoint: Path | None = None) -> None:
        """Load ``checkpoint``, or the configured weights. A checkpoint of factors does not contain their base."""
        model = self.config.model
        if checkpoint is None and model.weights is not None:
            checkpoint = model.weights / "trainer"
        if checkpoint is None or model.lora.is_set:
            self.state.load_hugging_face(model.path)
        if checkpoint is not None:
            self.state.load_weights(checkpoint)
        elif model.lora.is_set and model.lora.path is not None:
            self.state.load_adapter(model, model.lora.path, self.device)
        elif model.lora.is_set:
            self.state.fill_lora_weights(load_option("lora-start"))

    def _add_frozen(self, role: ModelRole) -> None:
        """Keep the weights of ``role`` for the same modules. Only the initial policy has factors.

        Raises:
            ConfigError: it is a different model.
        """
        if role.path is None or self.config.has_same_base(role):
            with contextlib.nullcontext() if role.path is None else self.state.without_lora():
                self.state.add_frozen(role.name)
            return
        if not self.state.is_same_model(role.path):
            raise ConfigError(
                f"{role.setting}={role.path}: its model has other dimensions, or other settings, than model.path; "
                f"use a model with the same ones, or {role.section}.placement=workers"
            )
        with self.state.without_lora(), self.state.snapshot(base=True):
            self.state.load_hugging_face(role.path)
            self.state.add_frozen(role.name, base=True)

    def load_weights(self, directory: Path, role: str) -> None:
        own = role == self._role.name
        with self._settled("load"), contextlib.nullcontext() if own else self.state.snapshot():
            self.state.load_weights(directory)
            if not own:
                self.state.add_frozen(role)

    # --------------------------------------------------------------------------------------------------------- training
    def begin_step(self, denominator: float | None = None, tokens: int | None = None) -> None:
        with self._phase("begin_step"):
            self._zero_gradients()
            coefficient = self.config.algorithm.moe_aux_loss_coef
            loss = BalanceLoss.of_step(coefficient, denominator, tokens, self.replicas, self.device)
            loads = ExpertLoads.of_step(self.config.trainer.router_bias_rate, self.dimensions, self.device)
            self._step = StepSums(denominator, Balance(loss, loads))
            self._step.replay = Replay.in_training(self._replays, self.dimensions)

    def loss_inputs(self, batch: MicroBatch, *outputs: Tensor) -> Any:
        """Return the loss's inputs of a micro-batch, from the head's (R,) outputs for the whole pack.

        Without a scoring pass, this pass's logprobs become the pack's old ones: the only update starts from the same
        weights.
        """
        algorithm, pack = self.config.algorithm, batch.pack
        scored = algorithm.supervised or algorithm.scores_policy or self._role.head != "logprob"
        if pack.old_logprobs is None and not scored:
            batch.given.old_logprobs = pack.old_logprobs = outputs[0].detach().float()
        return self._loss.inputs(pack, *outputs)

    def finish_step(self, denominator: float) -> StepStats | None:
        self._step.require_denominator(denominator)
        beat()  # a rank that waits here for others is ahead of them
        with self._phase("finish_step"):
            require_finite_losses(self._step, self.device)
            self.finalize_gradients(denominator)
            norm = self.optimizer.gradient_norm()
            require_finite_norm(norm)
            self.optimizer.update(norm)
            if self._step.balance.loads is not None:
                self._step.balance.loads.move(self._router_biases())
            return self._statistics(denominator, norm)

    def _statistics(self, denominator: float, norm: float) -> StepStats | None:
        figures = self._step.router_figures(len(self.dimensions.expert_layers), self.device)
        if self._step.sums is None:
            return None
        sums = reduce_over_data(self._step.sums, self.replicas)
        stats = sums.to_stats(denominator, norm, self.optimizer.learning_rate)
        if self._role.name == POLICY and self.config.distillation.exact_coef > 0:
            figures["source_kls"] = self._step.kls_of(sorted(self.config.distillation.teachers), self.replicas)
        return replace(stats, **figures)

    def export_gradients(self, denominator: float) -> Iterator[WeightBucket]:
        self._step.require_denominator(denominator)
        with self._phase("finalize_gradients"):
            self.finalize_gradients(denominator)
        with self._phase("gathering gradients"):
            return self.state.export_gradients(self._bucket_bytes)

    # ---------------------------------------------------------------------------------------------------------- scoring
    def score(self, micro_batches: Sequence[PackedTrajectory], role: str | None = None) -> list[Scores] | None:
        name = role or self._role.name
        own = name == self._role.name
        if not own and name not in self.state.frozen:
            section = name.partition(".")[0]
            raise rank_error(
                "score",
                f"no {name} is loaded: the settings have none, or {section}.placement is workers",
                code=f"no-{section}",
                remedy="configure one, with placement: trainer",
            )
        replay, scorer = None, self.config.roles[name]
        if own:
            replay = Replay.in_scoring(self._replays, self.dimensions, micro_batches, is_step=role is not None)
        else:
            self.settle_weights()
        with contextlib.nullcontext() if own else self.state.swap_in(name):
            for model in self.models:
                model.scores_hidden = scorer.head == "hidden"
            scored = self._score(micro_batches, replay)
        if scored is None:
            return None
        return [{name: each.float() for name, each in zip(scorer.fields, outputs, strict=False)} for outputs in scored]

    @property
    def _replays(self) -> str:
        """``algorithm.routing_replay`` if the modules are the policy."""
        return self.config.algorithm.routing_replay if self._role.name == POLICY else "none"

    # ------------------------------------------------------------------------------------------- transfer of the state
    def perturb_adapter(self, size: float | None) -> None:
        self.settle_weights()
        self._perturbed.close()
        if size is not None:
            self._perturbed.enter_context(self.state.snapshot(on_device=True))
            self.state.fill_lora_weights(partial(load_option("lora-trial"), size=size / self.config.model.lora.scale))

    @property
    def _bucket_bytes(self) -> int:
        return self.config.bucket_bytes(on_gpus=torch.cuda.is_available())

    def export_weights(self) -> WeightExport:
        self.settle_weights()
        return to_checkpoint_layout(self.state.export_weights(self._bucket_bytes), self.config.model)

    def export_hf(self, directory: Path) -> None:
        with self._settled("writing the Hugging Face model"):
            self.state.export_hugging_face(directory)

    def save(self, directory: Path) -> None:
        with self._settled("save"):
            self.state.plan_save(directory).write_all()

    def start_save(self, directory: Path) -> PendingSave:
        if self._started is not None and self._started.is_running:
            raise TrainerError(
                f"saving {directory} cannot start before the running save is finished",
                code="save-under-way",
                who=f"rank {self.placement.rank}",
                phase="save",
                remedy="finish that first",
            )
        with self._settled("save"):
            self._started = self.state.plan_save(directory, self.state.save_copies)
            self._started.write_in_background()
        return _StartedSave(self, self._started)

    def load(self, directory: Path) -> None:
        with self._settled("load"):
            self.state.load(directory)

    def save_weights(self, directory: Path) -> None:
        with self._settled("save"):
            self.state.save_weights(directory)

    def offload(self, keep_weights: bool = False) -> None:
        self.settle_weights()
        self.state.offload(keep_weights)

    def onload(self) -> None:
        self.state.onload()

    def shutdown(self) -> None:
        if hasattr(self, "state"):  # set-up may have failed earlier
            self.state.close()


@dataclass(frozen=True, slots=True)
class _StartedSave:
    trainer: "TrainerBase"
    writing: CheckpointWriter

    def is_written(self) -> bool:
        return self.writing.is_written()

    def finish(self) -> None:
        with self.trainer._phase("save"):
            self.writing.finish(self.trainer.config.trainer.step_timeout_s)
