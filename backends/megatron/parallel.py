"""Process groups of one trainer rank."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from backends.common.process.rendezvous import fake_world, join_world
from slime_like.config import ParallelConfig, TrainerConfig
from slime_like.interfaces import RankCoordinates, RankPlacement
from slime_like.plugins.options import load_option


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Return the tensor-parallel size inside one expert: 1 with expert parallelism, else as in the dense layers."""
    return 1 if parallel.expert > 1 else parallel.tensor


def new_parameter(config: TransformerConfig, shape: Sequence[int], axis: int | None = 0) -> Any:
    """Return a parameter without values, marked as one that ranks split along ``axis``, if they do."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    if axis is not None:
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    return parameter


def initialize(trainer: TrainerConfig, placement: RankPlacement, seed: int) -> RankCoordinates:
    """Join the other ranks and build every process group, each with the step's time limit."""
    join_world(trainer, placement)
    _build_groups(trainer)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return coordinates()


def _build_groups(trainer: TrainerConfig, with_devices: bool = True) -> None:
    """Build Megatron's groups of the configured layout inside an existing world.

    Args:
        with_devices: also build host-memory groups for CUDA machines.
    """
    parallel = trainer.parallel
    virtual = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        distributed_timeout_minutes=trainer.step_timeout_s / 60,
        create_gloo_process_groups=with_devices and torch.cuda.is_available(),
    )


def coordinates() -> RankCoordinates:
    """Return this rank's position on every axis, read from Megatron's groups."""
    return RankCoordinates(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
    )


def leave() -> None:
    """Dissolve Megatron's groups and the process group."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def alone_as(trainer: TrainerConfig, rank: int, on_meta: bool = False) -> Iterator[None]:
    """Act as ``rank`` of the layout without the others, in this process: collectives return immediately and do nothing.

    Args:
        on_meta: GPU tensors become shapes only; models can then be run.
    """
    with fake_world(rank, trainer.parallel.world_size, leave), load_option("megatron-on-cpu")(on_meta):
        _build_groups(trainer, with_devices=False)
        if on_meta:
            tensor_parallel.model_parallel_cuda_manual_seed(0)  # shapes need the states, not their values
        yield
