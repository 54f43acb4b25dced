"""The FSDP2 trainer on Hugging Face's models, one object per rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.common.process.rendezvous import join_world
from backends.common.step.balance import NO_BALANCE, Balance, balance_loss
from backends.common.step.packs import require_computable
from backends.common.step.routes import Replay
from backends.common.trainer.base import TrainerBase
from backends.fsdp import parallel
from backends.fsdp.attention import FsdpInput, model_input
from backends.fsdp.model import FsdpModel, build
from backends.fsdp.optimizer import FsdpOptimizer
from backends.fsdp.own_forward import narrow_windows, require_own_forward
from backends.fsdp.parallel import FsdpGroups
from backends.fsdp.state import FsdpState
from slime_like.checks.packages import attention_problems, missing_flash_attention
from slime_like.config import ModelConfig, RunConfig, TrainerConfig
from slime_like.errors import ConfigError, TrainerError
from slime_like.interfaces import Planner, RankPlacement
from slime_like.interfaces.conversion import Converter
from slime_like.models.weight_files import is_router_bias
from slime_like.statistics import StepStats
from slime_like.system.heartbeat import beat
from slime_like.trajectory import PackedTrajectory


class FsdpTrainer(TrainerBase):
    """One rank of an FSDP2 trainer. See ``TrainerBackend`` for the meaning of every method."""

    state: FsdpState
    optimizer: FsdpOptimizer
    model: FsdpModel
    groups: FsdpGroups

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        super().__init__(config, placement)
        self._by_package = config.trainer.attention == "ring_flash_attn"

    @staticmethod
    def planner() -> Planner:
        from backends.fsdp import planning

        return planning

    @staticmethod
    def converter(model: ModelConfig, trainer: TrainerConfig) -> Converter:
        from backends.fsdp.checkpoint import FsdpConverter

        return FsdpConverter(model, trainer)

    # ------------------------------------------------------------------------------------------------------------ start
    def _machine_problems(self) -> list[str]:
        trainer, on_cuda = self.config.trainer, torch.cuda.is_available()
        return [*attention_problems(trainer, self.config.model), *missing_flash_attention(trainer, on_cuda)]

    def _build(self) -> None:
        # gloo in addition to NCCL, to measure gradients in host memory.
        join_world(self.config.trainer, self.placement, cuda_backend="cpu:gloo,cuda:nccl")
        self.groups = parallel.build_groups(self.config.trainer)
        self.coordinates, self.replicas = self.groups.coordinates, self.groups.replicas
        on_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        torch.manual_seed(self.config.seed + self.placement.rank)
        has_entropy, values = self.config.algorithm.entropy_coef > 0, self.dimensions.values
        self.model = build(self.config.model, self.config.trainer, self.groups, self.device, has_entropy, values)
        self.models = [self.model]
        if self._replays != "none" and self.model.routed_layers != list(self.dimensions.expert_layers):
            raise ConfigError(
                f"algorithm.routing_replay={self.config.algorithm.routing_replay} does not support the routers of "
                f"transformers' {type(self.model.hugging_face).__name__}; use none, or trainer.backend=megatron"
            )
        self.state = FsdpState(self.config, self.model, self.groups, self.device)

    def _prepare_training(self) -> FsdpOptimizer:
        self._require_own_forward()
        optimizer = self.state.optimizer = FsdpOptimizer(
            self.config.trainer.optimizer, self.config.total_updates, self.model, self.device
        )
        return optimizer

    def _prepare_scoring(self) -> None:
        self._require_own_forward()
        self.model.requires_grad_(False)

    def _require_own_forward(self) -> None:
        windows = narrow_windows(self.model.hugging_face)
        with self.state.without_lora(), self.model.even_head(), windows:  # transformers' experts have no factors
            require_own_forward(self.config.model, self.dimensions, self.model, self._score, self.device)

    # --------------------------------------------------------------------------------------------------------- training
    def _zero_gradients(self) -> None:
        self.optimizer.zero_gradients()

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        """Run forward and backward for one window. Ranks sum their gradients in its last backward pass."""
        self._step.open_window(last)
        always = self.config.trainer.fsdp.accumulate == "sharded"
        with self._phase("accumulate"):
            for index, pack in enumerate(micro_batches):
                self.model.sum_gradients(always or index + 1 == len(micro_batches))
                batch = self._batch(pack, self._step.balance, self._step.replay)
                loss, sums = self._loss(self.loss_inputs(batch, *self._forward(batch)))
                self._step.add(loss, sums, pack.source)
                if batch.routed is not None and batch.routed.balance.loss is not None:
                    loss = loss + balance_loss(self.dimensions, batch.routed, self.groups.context)
                loss.backward()

    def _batch(self, pack: PackedTrajectory, balance: Balance = NO_BALANCE, replay: Replay | None = None) -> FsdpInput:
        """Return this rank's part of a pack. All layers must be able to attend to its whole sequences."""
        beat()
        reach = self.dimensions.attention.reach
        if reach is not None and pack.max_seqlen > reach:
            raise TrainerError(
                f"a sequence has {pack.max_seqlen} tokens, but layers of {self.config.model.path} attend to chunks of "
                f"{reach} (attention_chunk_size), which packed attention does not support",
                code="sequence-beyond-chunk",
                remedy="train on shorter sequences",
            )
        require_computable(pack, self.dimensions.vocab_size)
        context, recurs = self.groups.context, self.model.recurs
        return model_input(pack, self.device, context, self._by_package, balance, replay, recurs)

    def _forward(self, batch: FsdpInput) -> tuple[Tensor, ...]:
        shard, self.model.routed = batch.shard, batch.routed
        return batch.whole(self.model(shard.tokens, shard.position_ids, batch.mixers, batch.responses))

    def finalize_gradients(self, denominator: float) -> None:
        """Divide gradients, which are already summed over all ranks."""
        self.optimizer.scale(1.0 / denominator)

    def finish_step(self, denominator: float) -> StepStats | None:
        stats = super().finish_step(denominator)
        with self._phase("finish_step"):
            self.optimizer.zero_gradients()
            self.model.shard_weights()
        return stats

    def _router_biases(self) -> dict[int, Tensor]:
        biases = [tensor for name, tensor in self.model.kept_by_name().items() if is_router_bias(name)]
        return dict(zip(self.dimensions.expert_layers, biases, strict=True))

    # ---------------------------------------------------------------------------------------------------- scoring, end
    @torch.no_grad()
    def _score(self, packs: Sequence[PackedTrajectory], replay: Replay | None = None) -> list[tuple[Tensor, ...]]:
        scored = []
        with self._phase("score"):
            for pack in packs:
                batch = self._batch(pack, replay=replay)
                scored.append(self._forward(batch))
                if batch.routed is not None:
                    batch.routed.record(pack, self.groups.context)
            self.model.shard_weights()
        return scored

    def shutdown(self) -> None:
        parallel.leave()
        super().shutdown()
