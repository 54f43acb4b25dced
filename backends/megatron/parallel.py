"""Process groups of one trainer rank, and which parallel layouts a model admits."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slime_like.config import ParallelConfig, RunConfig
from slime_like.config.dimensions import ModelDimensions
from slime_like.errors import TrainerError
from slime_like.interfaces import RankCoordinates, RankPlacement


def layout_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> list[str]:
    """Why this layout cannot run this model: one sentence per fault, with field, value and remedy."""
    problems = _tensor_problems(parallel, dimensions) + _pipeline_problems(parallel, dimensions)
    if parallel.sequence and parallel.tensor == 1:
        problems.append("trainer.parallel.sequence=true needs trainer.parallel.tensor above 1; switch it off")
    return problems + _expert_problems(parallel, dimensions)


def _tensor_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> list[str]:
    problems = []
    counts = {
        "attention heads": dimensions.num_heads,
        "KV heads": dimensions.num_kv_heads,
        "feed-forward columns": dimensions.moe_ffn_hidden_size or dimensions.ffn_hidden_size,
    }
    for what, count in counts.items():
        if count % parallel.tensor:
            problems.append(
                f"trainer.parallel.tensor={parallel.tensor} does not divide the model's {count} {what}; "
                f"use {_divisors(dimensions)}"
            )
    return problems


def _divisors(dimensions: ModelDimensions) -> str:
    ffn = dimensions.moe_ffn_hidden_size or dimensions.ffn_hidden_size
    heads = dimensions.num_kv_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and dimensions.num_heads % n == 0 and ffn % n == 0]
    return " or ".join(filter(None, [", ".join(map(str, fits[:-1])), str(fits[-1])]))


def _pipeline_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> list[str]:
    problems = []
    stages = parallel.pipeline * parallel.virtual_pipeline
    if dimensions.num_layers % stages:
        problems.append(
            f"trainer.parallel.pipeline={parallel.pipeline} times virtual_pipeline={parallel.virtual_pipeline} does "
            f"not divide the model's {dimensions.num_layers} layers; use sizes whose product does"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        problems.append(
            f"trainer.parallel.virtual_pipeline={parallel.virtual_pipeline} needs trainer.parallel.pipeline above 1; "
            "set it to 1"
        )
    return problems


def _expert_problems(parallel: ParallelConfig, dimensions: ModelDimensions) -> list[str]:
    if dimensions.num_experts == 0:
        if parallel.expert == 1:
            return []
        return [f"trainer.parallel.expert={parallel.expert}, but the model is dense; set it to 1"]
    problems = []
    if dimensions.num_experts % parallel.expert:
        problems.append(
            f"trainer.parallel.expert={parallel.expert} does not divide the model's {dimensions.num_experts} experts; "
            "use a divisor"
        )
    replicas = parallel.tensor * parallel.context * parallel.data
    if replicas % (parallel.expert * expert_tensor_size(parallel)):
        problems.append(
            f"trainer.parallel.expert={parallel.expert} does not divide tensor * context * data = {replicas}; "
            "use a divisor of it"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        problems.append(
            f"trainer.parallel.tensor={parallel.tensor} on a mixture of experts needs sequence parallelism; "
            "set trainer.parallel.sequence=true"
        )
    return problems


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Tensor-parallel size inside one expert: whole experts with expert parallelism, else as the dense layers."""
    return 1 if parallel.expert > 1 else parallel.tensor


def initialize(config: RunConfig, placement: RankPlacement) -> RankCoordinates:
    """Join the other ranks and build every process group, each with the step's time limit.

    Raises:
        TrainerError: the world's size is not that of the configured layout, or the others did not come in time.
    """
    parallel = config.trainer.parallel
    if placement.world_size != parallel.world_size:
        raise TrainerError(
            f"rank {placement.rank}, setup: the world has {placement.world_size} ranks, but tensor * pipeline * "
            f"context * data is {parallel.world_size}; start as many ranks as the layout has"
        )
    _join(config, placement)
    virtual = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        distributed_timeout_minutes=config.trainer.step_timeout_s / 60,
        create_gloo_process_groups=torch.cuda.is_available(),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    return coordinates()


def _join(config: RunConfig, placement: RankPlacement) -> None:
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(placement.local_rank)
    start = timedelta(seconds=config.trainer.start_timeout_s)
    try:
        store = dist.TCPStore(
            placement.master_address,
            placement.master_port,
            placement.world_size,
            is_master=placement.rank == 0,
            timeout=start,
        )
    except (dist.DistError, RuntimeError) as error:
        raise TrainerError(
            f"rank {placement.rank}, setup: no rendezvous at {placement.master_address}:{placement.master_port} "
            f"within {start.total_seconds():.0f} s ({error}); check that all ranks start and that the port is free"
        ) from error
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=config.trainer.step_timeout_s),
    )


def coordinates() -> RankCoordinates:
    """This rank's place on every axis, read from Megatron's groups."""
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
