"""Running of micro-batch windows through Megatron's schedules, and overlap of their communication with computation.

Gradients are summed over replicas once per step, bucket by bucket. With overlap (``trainer.optimizer.overlap``), a
bucket's sum starts as soon as the step's last micro-batch has filled it. Only the caller of ``accumulate`` knows which
one is last. If it does not say so, the sums start at the end of the step, which costs only time. Sharded weights are
gathered when the next forward pass reaches them; any other reader of weights settles them first.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from backends.common.step.routes import Replay
from backends.megatron.micro_batch import BatchBuilder, ModelInput
from backends.megatron.versions import require
from slime_like.system.heartbeat import beat
from slime_like.trajectory import PackedTrajectory


class PipelineMessages(P2PCommunicator):
    """Messages between the stages of one window.

    Every stage builds the same micro-batches, so it knows the shape of each message. Megatron would send shapes ahead
    of each message and synchronize the device to read them.
    """

    def __init__(self, config: Any, tokens: Iterable[int]) -> None:
        require(P2PCommunicator, "_communicate_shapes")
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        shapes = [(count, 1, config.hidden_size) for count in tokens]
        self._from_previous, self._from_next = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        """Return the shapes to receive. 1F1B keeps the order of the micro-batches in both directions."""
        return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Megatron's forward-backward function for this rank's chunks (plain, 1F1B or interleaved).

    Training needs chunks inside Megatron's DDP; scoring also accepts bare chunks.
    """

    chunks: Sequence[MegatronModule]
    builder: BatchBuilder
    offload: Any = None  # ``ActivationOffload``

    def passes(
        self, batches: list[ModelInput], after: Callable[..., Any], forward_only: bool = False
    ) -> Callable[[], list[Any]]:
        """Prepare the passes of one window. Call the result to run them.

        Args:
            after: called on the last stage with each micro-batch and its output; returns what Megatron's loss function
                must return, or with ``forward_only``, when it also gets ``non_loss_data``, what the passes return.
        """

        def forward(batches: Any, model: MegatronModule) -> tuple[Tensor, Callable[..., Any]]:
            beat()
            batch: ModelInput = next(batches)
            tokens, positions = batch.shard.tokens.unsqueeze(0), batch.shard.position_ids.unsqueeze(0)
            with contextlib.nullcontext() if self.offload is None else self.offload.saving():
                output = model(tokens, positions, None, packed_seq_params=batch.layout)
            return output, partial(after, batch)

        config = self.chunks[0].config
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return partial(
            get_forward_backward_func(),
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=list(self.chunks),
            num_microbatches=len(batches),
            seq_length=max(batch.shard.tokens.numel() * batch.shard.cp_size for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=PipelineMessages(config, (len(batch.shard.tokens) // shards for batch in batches)),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    @torch.no_grad()
    def score(self, packs: Sequence[PackedTrajectory], replay: Replay | None = None) -> list[tuple[Tensor, ...]] | None:
        """Return the head's (R,) outputs for every pack on the last stage, ``None`` on the others."""
        batches = self.builder.build(packs, replay=replay) if packs else []

        def collect(batch: ModelInput, output: Tensor, non_loss_data: bool) -> tuple[Tensor, ...]:
            return batch.whole(output)

        results = self.passes(batches, collect, forward_only=True)() if packs else []
        for batch in batches[: len(packs)]:
            if batch.layout.routed is not None:
                batch.layout.routed.record(batch.given, parallel_state.get_tensor_and_context_parallel_group())
        return results[: len(packs)] if parallel_state.is_pipeline_last_stage() else None


@dataclass(frozen=True, slots=True)
class Communication:
    """Messages of Megatron's DDP wrappers for one rank's chunks. Collective over the replicas of a shard."""

    chunks: Sequence[DistributedDataParallel]

    def attach(self) -> None:
        """Let the head request its weight, because it reads it without calling the layer that owns it."""
        for chunk in self.chunks:
            gathers = chunk.ddp_config.overlap_param_gather and chunk.module.post_process
            # A frozen weight is in no group.
            if gathers and (group := chunk.param_to_bucket_group.get(chunk.module.output_weight())):
                chunk.module.gather_weight = group.finish_param_sync

    def begin_step(self) -> None:
        """Wait for an abandoned step's messages before gradients are zeroed."""
        for group in self._groups():
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None

    @contextlib.contextmanager
    def window(self, last: bool) -> Iterator[None]:
        """Wrap a window's schedule. In the step's last window, Megatron may send completed buckets."""
        config = self.chunks[0].config
        with contextlib.ExitStack() as stack:
            if last:
                config.no_sync_func = self._silent
                stack.callback(setattr, config, "no_sync_func", None)
            else:
                stack.enter_context(self._silent())
            yield

    def start_sums(self) -> None:
        """Start sums that did not start during backward. In a first step, Megatron starts them itself."""
        for group in self._groups():
            if group.ddp_config.overlap_grad_reduce and not group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync()

    def settle_weights(self) -> None:
        """Gather weights that no forward pass has requested since the last update, and wait for running gathers."""
        for group in self._groups():
            if group.ddp_config.overlap_param_gather and (
                not group.param_gather_dispatched or group.param_gather_handle is not None
            ):
                group.start_param_sync(force_sync=True)

    def gather_gradients(self) -> None:
        """Gather the sums if the optimizer is sharded, because each rank has finished only its shard's."""
        for group in self._groups():
            if not group.ddp_config.use_distributed_optimizer:
                continue
            replicas = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shard = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=replicas)

    @contextlib.contextmanager
    def _silent(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def _groups(self) -> list[Any]:
        return [group for chunk in self.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]
