"""AdamW on Megatron's optimizers, its schedule, a step that rejects a bad gradient, and its state for a checkpoint.

In a checkpoint, the distributed optimizer's state has the parameters' shapes, without a copy. A data-parallel rank
holds a flat range of every parameter's elements. Megatron's reshardable format gathers all ranges in every rank's host
memory: 12 bytes per parameter and rank, twice. Here, a few boxes of the parameter describe a range. Each rank writes
its boxes, and reads directly into its state. Keys and global shapes match Megatron's format ``fully_reshardable``, so
either can read what the other wrote.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from torch import Tensor

from backends.megatron.head import LogprobModel
from slime_like.config import OptimizerConfig


def wrap_for_data_parallel(optimizer: OptimizerConfig, chunks: list[LogprobModel]) -> list[DistributedDataParallel]:
    """Wrap every chunk in Megatron's DDP: gradients accumulate in fp32 buffers and are summed over replicas."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.distributed,
        overlap_grad_reduce=optimizer.overlap,
        overlap_param_gather=optimizer.overlap and optimizer.distributed,
        bucket_size=optimizer.overlap_bucket_params,
        check_for_nan_in_grad=False,
        average_in_collective=False,
    )
    return [
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def megatron_settings(settings: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Build Megatron's configuration of the optimizer."""
    result = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.distributed,
        overlap_param_gather=settings.overlap and settings.distributed,
        optimizer_cpu_offload=settings.offload,
        optimizer_offload_fraction=1.0 if settings.offload else 0.0,
    )
    if settings.offload:
        # Main weights are only in the host optimizer, not also on the device. Set afterwards, because Megatron's check
        # of this switch requires Transformer Engine, which its host optimizer does not need.
        result.use_precision_aware_optimizer = True
        result.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        result.store_param_remainders = False
    return result


class Optimizer:
    """AdamW with decoupled weight decay (none on norms and biases), global clipping and the run's schedule.

    Attributes:
        is_distributed: each data-parallel rank holds a part of main weights and moments.
        scheduler: Megatron's schedule over the run's ``updates``; step n (from 1) of the warm-up runs at
            n / warmup_steps of the peak rate.
    """

    def __init__(self, settings: OptimizerConfig, updates: int, chunks: list[DistributedDataParallel]) -> None:
        grows = settings.final_weight_decay is not None
        self._clip = settings.clip_grad
        self.is_distributed = settings.distributed
        self.megatron: Any = get_megatron_optimizer(
            megatron_settings(settings, chunks[0].config.params_dtype),
            chunks,
            use_gloo_process_groups=next(chunks[0].parameters()).is_cuda,
        )
        for part in self.parts:
            if isinstance(part.optimizer, torch.optim.AdamW):
                _fuse(part.optimizer)
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(updates, settings.warmup_steps + 1),
            lr_decay_style=settings.decay,
            start_wd=settings.weight_decay,
            end_wd=settings.final_weight_decay if grows else settings.weight_decay,
            wd_incr_steps=updates if grows else 1,
            wd_incr_style="linear" if grows else "constant",
        )

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimizers that hold parameters: one for dense, one for expert-parallel weights."""
        return [part for part in self.megatron.chained_optimizers if not part.is_stub_optimizer]

    @property
    def learning_rate(self) -> float:
        """Rate of the last step taken."""
        rate = get_canonical_lr_for_logging(self.megatron.param_groups)
        return 0.0 if rate is None else rate

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Move finished gradients to the main parameters and measure their global norm, before clipping."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    @torch.no_grad()
    def update(self, gradient_norm: float) -> None:
        """Clip by the measured norm and take one AdamW step at the schedule's next rate."""
        for part in self.parts:
            if parameters := part.get_parameters():
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, self._clip, gradient_norm, use_decoupled_grad=decoupled)
        self.scheduler.step(1)
        self.megatron.step_with_ready_grads()


def _fuse(adamw: torch.optim.AdamW) -> None:
    """Make torch's AdamW, Megatron's choice without Transformer Engine, update in one pass over memory.

    Its default allocates temporaries of all parameters on a GPU. Fused, ``step`` is on the parameter's device.
    """
    for group in adamw.param_groups:
        group["fused"] = True


# ------------------------------------------------------------------------------------------------- state in checkpoints
_COUNTER = "step"
"""Entry of an optimizer's state without the parameter's shape; saved once for all parameters."""


def sharded_optimizer_state(part: Any, model: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """Describe this rank's main weights and moments by views of them.

    Args:
        part: Megatron's ``DistributedOptimizer`` with filled state.
        model: sharded state of the model chunks, whose entries hold the parameters.
    """
    tensors = (entry for entry in nested_values(dict(model)) if isinstance(entry, ShardedTensor | ShardedTensorFactory))
    described = {entry.data: entry for entry in tensors}
    return {
        f"{piece.key} {piece.global_offset}": piece
        for buckets in part.gbuf_ranges
        for ranges in buckets.values()
        for bucket in ranges
        for parameter, held in bucket["param_map"].items()
        for name, tensor in part._get_main_param_and_optimizer_states(parameter).items()
        if name != _COUNTER
        for piece in _pieces(f"optimizer.state.{name}", described[parameter], tensor, held["param"].start)
    }


def _pieces(
    prefix: str, parameter: ShardedTensor | ShardedTensorFactory, tensor: Tensor, start: int
) -> Iterator[ShardedTensor]:
    """Describe ``tensor``, the parameter's elements from ``start`` on, box by box."""
    flat = tensor.detach().view(-1)
    for part, first in _parts(parameter):
        count = math.prod(part.local_shape)
        begin, end = max(start, first), min(start + flat.numel(), first + count)
        where = begin - start
        for offsets, sizes in boxes(begin - first, end - first, part.local_shape):
            length = math.prod(sizes)
            leading = (1,) * part.prepend_axis_num
            offset = (*part.global_offset[: len(leading)], *_sum(part.global_offset[len(leading) :], offsets))
            shape = (*leading, *sizes)
            yield ShardedTensor(
                key=f"{prefix}.{part.key}",
                data=flat[where : where + length].view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=part.global_shape,
                global_offset=offset,
                axis_fragmentations=None,
                # The last number counts data-parallel replicas, which hold different elements here.
                replica_id=(*part.replica_id[:2], 0),
                allow_shape_mismatch=part.allow_shape_mismatch,
            )
            where += length


def _parts(parameter: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield a parameter's parts that are tensors on disk, each with the number of elements before it.

    Gate and up projection are one parameter here, but two parts of the tensor on disk.
    """
    if isinstance(parameter, ShardedTensor):
        yield parameter, 0
        return
    first = parameter.data.storage_offset()
    for part in nested_values(parameter.build()):
        assert part.data.is_contiguous(), f"{part.key}: a part of a parameter must be contiguous"
        yield replace(part, data=None), part.data.storage_offset() - first


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cover the elements ``start`` to ``stop`` of a row-major tensor by ordered boxes, as (offsets, sizes).

    At most ``2 * len(shape) - 1`` boxes: the end of a row, whole rows, the start of a row, and recursively in each row.
    """
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        rows = 0 if within else (stop - start) // row
        if rows:
            yield (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for offsets, sizes in boxes(within, end - index * row, shape[1:]):
            yield (index, *offsets), (1, *sizes)
        start = end
