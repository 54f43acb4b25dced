"""What runs in separate processes: importable there, as the command's own module is not."""

from functools import partial

import torch

from benchmarks.trainer.batch import full_packs, quickstart_packs
from benchmarks.trainer.measure import Figures, measure
from benchmarks.trainer.sides import BackendSide, HuggingFaceSide, Side
from benchmarks.trainer.work import matmul_ceiling
from slime_like.config import RunConfig
from slime_like.cpu.onednn import use_onednn
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.estimates import estimated_kinds, plannable_backend
from slime_like.planning.memory import trainer_phases
from slime_like.planning.planned_run import PlannedRun
from slime_like.trajectory import PackedTrajectory

HUGGING_FACE = ("hf-packed", "hf-padded")
BACKENDS = ("megatron", "fsdp")


def step_packs(dimensions: ModelDimensions, tokens: int | None, count: int) -> list[PackedTrajectory]:
    """``count`` packs of ``tokens`` each; without a number a minibatch of the quickstart's shape."""
    return quickstart_packs() if tokens is None else full_packs(tokens, count, dimensions.vocab_size)


def measured(side: str, config: RunConfig, tokens: int | None, count: int, repeats: int) -> Figures:
    """A side's times and memory."""
    packs = step_packs(ModelDimensions.from_checkpoint(config.model.path), tokens, count)
    return measure(partial(_side, side, config, packs), repeats)


def planned_bytes(config: RunConfig) -> int:
    """Peak of a training step in the plan of ``config``, which has one rank, without what the plan assumes.

    Its reserve and its fragmentation are no allocations of torch.
    """
    backend = plannable_backend(config)
    ((kind, estimate),) = estimated_kinds(config, backend, backend.planner().rank_kinds(config))
    training, *_ = trainer_phases(PlannedRun.of(config), None, kind, estimate)
    return sum(item.nbytes for item in training.items if not item.name.endswith("(assumed)"))


def _side(side: str, config: RunConfig, packs: list[PackedTrajectory]) -> Side:
    if side in BACKENDS:
        return BackendSide(side, config, packs)
    _prepare(config.trainer.cpu_threads)
    return HuggingFaceSide(
        config.model.path,
        getattr(torch, config.model.dtype),
        packs,
        padded=side == HUGGING_FACE[1],
        budget=config.trainer.target_tokens_per_batch,
        recompute=config.trainer.recompute != "none",
    )


def _prepare(threads: int | None) -> None:
    """What trainer ranks do: without it, products on a CPU could be slower."""
    if threads is not None:
        torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        use_onednn()


def ceiling(threads: int | None) -> float:
    """FLOP/s of matrix products in the precision of the device."""
    _prepare(threads)
    if torch.cuda.is_available():
        return matmul_ceiling(torch.device("cuda"), torch.bfloat16)
    return matmul_ceiling(torch.device("cpu"), torch.float32)
