"""Overlap of gradient and weight communication with computation (``trainer.optimizer.overlap``).

Gradients are summed over replicas once per step, bucket by bucket. With overlap, a bucket's sum starts as soon as the
step's last micro-batch has filled it. Only the caller of ``accumulate`` knows which one is last. If it does not say so,
the sums start at the end of the step, which costs only time. Sharded weights are gathered when the next forward pass
reaches them; any other reader of weights settles them first.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel


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
