"""The fewest recomputed layers with which a trainer fits its GPUs."""

import math
from dataclasses import dataclass, replace

from slime_like.checks.layout import layers_per_stage, layout_problems
from slime_like.config import RunConfig
from slime_like.config.trainer import FSDP
from slime_like.interfaces import TrainerBackend
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.engines import plan_engine
from slime_like.planning.memory import ACTIVATIONS, TRAINING, PhaseMemory, trainer_phases
from slime_like.planning.planned_run import PlannedRun, estimated_kinds, plannable_backend

ERROR = 0.1
"""Share of planned activations that stays free, because real ranks differ by up to this share from the plan
(``tests/parallel/test_planned_memory.py``)."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run with a number of recomputed layers, the estimates of its kinds of ranks, and their memory.

    Attributes:
        spare: free bytes in training after ``ERROR`` of its activations; below 0 if training does not fit.
    """

    run: PlannedRun
    found: list[tuple[RankKind, RankEstimate]]
    phases: list[PhaseMemory]
    spare: float


def chosen_recompute(config: RunConfig) -> RunConfig:
    """Replace ``trainer.recompute: auto`` by the fewest layers that fit ``cluster.gpu``, or by all if none do."""
    if config.trainer.recompute != "auto":
        return config
    run = PlannedRun.of(config)
    if layout_problems(config.trainer.parallel, run.dimensions):
        return config
    fitted = fewest_recomputed(run, plannable_backend(config.trainer.backend))
    return with_recompute(run, "full").config if fitted is None else fitted.run.config


def fewest_recomputed(run: PlannedRun, backend: type[TrainerBackend]) -> Fitted | None:
    """Recompute as few layers of every stage as fit; ``None`` if training does not fit even with all recomputed.

    Memory is nearly linear in the number of layers, so each try interpolates between a number that is too small and one
    that fits.
    """
    none = _tried(run, backend, 0)
    if none.spare >= 0:
        return none
    parallel, high = run.config.trainer.parallel, run.dimensions.num_layers
    if run.config.trainer.backend != FSDP:
        high = max(layers_per_stage(run.dimensions, parallel.pipeline * parallel.virtual_pipeline))
    low, fails, fits = 0, none, _tried(run, backend, high)
    if fits.spare < 0:
        return None
    while high - low > 1:
        share = fails.spare / (fails.spare - fits.spare)
        number = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        tried = _tried(run, backend, number)
        low, fails, high, fits = (low, fails, number, tried) if tried.spare >= 0 else (number, tried, high, fits)
    return fits


def with_recompute(run: PlannedRun, recompute: int | str) -> PlannedRun:
    trainer = run.config.trainer.model_copy(update={"recompute": recompute})
    return replace(run, config=run.config.model_copy(update={"trainer": trainer}))


def _tried(run: PlannedRun, backend: type[TrainerBackend], layers: int) -> Fitted:
    run = with_recompute(run, layers or "none")
    engine = plan_engine(run) if run.config.starts_engines else None
    found: list[tuple[RankKind, RankEstimate]] = []
    phases: list[PhaseMemory] = []
    kinds = backend.planner().rank_kinds(run.config.trainer)
    # The first stage has the most micro-batches in flight, and the last one the head.
    for kind in dict.fromkeys((kinds[0], kinds[-1])):
        found += estimated_kinds(run.config, backend, [kind])
        phases += trainer_phases(run, engine, *found[-1])
        if min(map(_spare, phases)) < 0:
            break
    return Fitted(run, found, phases, min(map(_spare, phases)))


def _spare(phase: PhaseMemory) -> float:
    if phase.phase != TRAINING:
        return math.inf
    return phase.margin - ERROR * phase.items[ACTIVATIONS]
