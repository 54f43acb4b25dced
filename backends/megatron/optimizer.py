"""AdamW on Megatron's optimizers, its schedule, and a step that rejects a bad gradient."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

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
