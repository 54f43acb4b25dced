"""Functions that run in separate processes, which cannot import the command's own module."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainer.batch import QUICKSTART_BUDGET, full_packs, quickstart_packs
from benchmarks.trainer.measure import Figures, measure
from benchmarks.trainer.sides import BackendSide, HuggingFaceSide, Side
from benchmarks.trainer.table import Workload
from benchmarks.trainer.work import matmul_ceiling, step_flops
from slime_like.config import RunConfig
from slime_like.models.dimensions import ModelDimensions
from slime_like.planning.memory import trainer_phases
from slime_like.planning.planned_run import PlannedRun, estimate_kinds, plannable_backend
from slime_like.trajectory import PackedTrajectory

HUGGING_FACE = ("hf-packed", "hf-padded")
BACKENDS = ("megatron", "fsdp")


def step_packs(dimensions: ModelDimensions, tokens: int | None, count: int) -> list[PackedTrajectory]:
    """Return ``count`` packs of ``tokens`` each, or a minibatch of the quickstart's shape if it is None."""
    return quickstart_packs() if tokens is None else full_packs(tokens, count, dimensions.vocab_size)


def workload(
    shape: str, dimensions: ModelDimensions, packs: Sequence[PackedTrajectory], budget: int | None
) -> Workload:
    """Describe a step on ``packs``."""
    real = sum(pack.actual_total_tokens for pack in packs)
    longest = [max(int(getattr(pack, name).max()) for pack in packs) for name in ("prompt_lens", "response_lens")]
    flops = step_flops(dimensions, packs)
    return Workload(shape, budget or QUICKSTART_BUDGET, len(packs), real, flops, *longest)


def run_config(model: Path, work: Workload, side: str, recompute: str, **trainer: Any) -> RunConfig:
    """Return the configuration of one rank that trains on ``work``; ``trainer`` adds settings."""
    return RunConfig(
        run_dir=model.parent / "run",
        model={"path": model, "dtype": dtype()},
        data={"max_prompt_tokens": work.longest_prompt},
        rollout={"max_new_tokens": work.longest_response},
        trainer={
            "backend": side if side in BACKENDS else BACKENDS[0],
            "target_tokens_per_batch": work.pack_tokens,
            "recompute": recompute,
            **trainer,
        },
    )


def dtype() -> str:
    """Return the precision of this machine's device."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


def measured(side: str, config: RunConfig, tokens: int | None, count: int, repeats: int) -> tuple[Figures, int | None]:
    """Return a side's times and memory, and its planned peak."""
    packs = step_packs(ModelDimensions.from_checkpoint(config.model.path), tokens, count)
    return measured_on(packs, side, config, repeats)


def measured_on(
    packs: list[PackedTrajectory],
    side: str,
    config: RunConfig,
    repeats: int,
    afterwards: Callable[[Side], object] | None = None,
) -> tuple[Figures, int | None]:
    """Do the same as ``measured`` for a step on ``packs``, then call ``afterwards`` with the side."""
    figures = measure(partial(_side, side, config, packs), repeats, afterwards)
    return figures, planned_bytes(config) if side in BACKENDS else None


def planned_bytes(config: RunConfig) -> int:
    """Return the planned peak of a training step of the one-rank ``config``, without assumed reserves.

    The plan's reserve and fragmentation are not allocations of torch.
    """
    backend = plannable_backend(config.trainer.backend)
    ((kind, estimate),) = estimate_kinds(config, backend, backend.planner().rank_kinds(config.trainer))
    training, *_ = trainer_phases(PlannedRun.of(config), None, kind, estimate)
    return sum(nbytes for name, nbytes in training.items.items() if not name.endswith("(assumed)"))


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
    """Prepare the process like a trainer rank's."""
    if threads is not None:
        torch.set_num_threads(threads)


def ceiling(threads: int | None) -> float:
    """Return the FLOP/s of matrix products in the device's precision."""
    _prepare(threads)
    if torch.cuda.is_available():
        return matmul_ceiling(torch.device("cuda"), torch.bfloat16)
    return matmul_ceiling(torch.device("cpu"), torch.float32)
