"""The Megatron-core trainer, one object per rank."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from backends.common.step.routes import Replay
from backends.common.trainer.base import TrainerBase
from backends.megatron import parallel
from backends.megatron.attention import for_lora, machine_problems
from backends.megatron.conversion.placement import EXPERT_BIAS, set_dropout
from backends.megatron.head import LogprobModel
from backends.megatron.micro_batch import BatchBuilder, ModelInput
from backends.megatron.model import build_chunks
from backends.megatron.optimizer import Optimizer, wrap_for_data_parallel
from backends.megatron.schedule import Communication, Schedule
from backends.megatron.state import MegatronState
from slime_like.config import ModelConfig, RunConfig, TrainerConfig
from slime_like.interfaces import Planner, RankPlacement
from slime_like.interfaces.conversion import Converter
from slime_like.plugins.options import load_option
from slime_like.trajectory import PackedTrajectory


class MegatronTrainer(TrainerBase):
    """One rank of a Megatron-core trainer. See ``TrainerBackend`` for the meaning of every method.

    Attributes:
        chunks: this rank's model chunks, without their data-parallel wrapping (after ``setup``).
    """

    state: MegatronState
    optimizer: Optimizer
    chunks: list[LogprobModel]
    wrapped: list[DistributedDataParallel]

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        super().__init__(for_lora(config), placement)
        self._communication = Communication([])

    @property
    def runtime(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for Megatron-core on this machine."""
        return contextlib.nullcontext() if torch.cuda.is_available() else load_option("megatron-on-cpu")()

    @staticmethod
    def planner() -> Planner:
        from backends.megatron.planning import estimate

        return estimate

    @staticmethod
    def converter(model: ModelConfig, trainer: TrainerConfig) -> Converter:
        from backends.megatron.offline import MegatronConverter

        return MegatronConverter(model, trainer)

    # ------------------------------------------------------------------------------------------------------------ start
    def _machine_problems(self) -> list[str]:
        return machine_problems(self.config.trainer, self.config.model, torch.cuda.is_available())

    def _build(self) -> None:
        self.coordinates = parallel.initialize(self.config.trainer, self.placement, self.config.seed)
        self.replicas = parallel_state.get_data_parallel_group(with_context_parallel=False)
        self.models = self.chunks = build_chunks(self.config, self.dimensions)
        self.device = next(self.chunks[0].parameters()).device
        self.state = MegatronState(self.config.model, self.config.checkpoint, self.chunks, self.dimensions)

    def _prepare_training(self) -> Optimizer:
        self.wrapped = self.state.wrapped = wrap_for_data_parallel(self.config.trainer.optimizer, self.chunks)
        optimizer = self.state.optimizer = Optimizer(
            self.config.trainer.optimizer, self.config.total_updates, self.wrapped
        )
        offload = load_option("activation-offload") if self.config.trainer.activation_offload else None
        activations = offload and offload(self.chunks, self.state.activations)
        self._schedule = Schedule(self.wrapped, self._batch_builder(), activations)
        self._communication = Communication(self.wrapped)
        self._communication.attach()
        return optimizer

    def _prepare_scoring(self) -> None:
        self._schedule = Schedule(self.chunks, self._batch_builder())

    def _batch_builder(self) -> BatchBuilder:
        return BatchBuilder(self.config.trainer, getattr(torch, self.config.model.dtype), self.dimensions, self.device)

    # --------------------------------------------------------------------------------------------------------- training
    def _zero_gradients(self) -> None:
        self._communication.begin_step()
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        """Run forward and backward for one window through Megatron's schedule."""
        self._step.open_window(last)
        set_dropout(self.chunks, True)
        with self._phase("accumulate"), self._communication.window(last):
            batches = self._schedule.builder.build(micro_batches, self._step.balance, self._step.replay)
            self._schedule.passes(batches, self._micro_batch_loss)()

    def _micro_batch_loss(self, batch: ModelInput, output: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the pack's undivided loss, from the head's output on the last stage."""
        loss, sums = self._loss(self.loss_inputs(batch, *batch.whole(output)))
        self._step.add(loss, sums, batch.pack.source)
        # Zero tokens: the schedule then leaves the sum unscaled, and the step is scaled at its end.
        return loss, torch.zeros((), dtype=torch.int, device=output.device), None

    def finalize_gradients(self, denominator: float) -> None:
        """Sum gradients over data and context ranks, and shared weights over their groups; scale by 1/denominator."""
        with self._phase("finalize_gradients"):
            self._communication.start_sums()
            finalize_model_grads(self.wrapped, None)
            for chunk in self.wrapped:
                chunk.scale_gradients(1.0 / denominator)

    def _router_biases(self) -> dict[int, Tensor]:
        modules: Iterator[Any] = (module for chunk in self.chunks for module in chunk.modules())
        routers = (module for module in modules if hasattr(module, EXPERT_BIAS))
        return {router.layer_number - 1: router.expert_bias for router in routers}

    # ------------------------------------------------------------------------------------------- scoring, weights, end
    def _score(
        self, packs: Sequence[PackedTrajectory], replay: Replay | None = None
    ) -> list[tuple[Tensor, ...]] | None:
        set_dropout(self.chunks, False)
        with self._phase("score"):
            return self._schedule.score(packs, replay)

    def settle_weights(self) -> None:
        """Make every weight of this rank whole: with ``trainer.optimizer.overlap``, an update may still be in progress.

        Every method here that reads weights calls it. Collective.
        """
        with self._phase("gathering weights"):
            self._communication.settle_weights()

    def shutdown(self) -> None:
        parallel.leave()
        super().shutdown()
