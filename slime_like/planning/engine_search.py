"""Other engines on the same GPUs: their number, their size, and their share of memory. Nothing is traced for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime_like.checks.check import check_settings
from slime_like.checks.definition import training_needs
from slime_like.checks.engine_arguments import SHARES
from slime_like.checks.layout import divisors
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning import checks
from slime_like.planning.engines import EnginePlan, engine_share, plan_engine, share_setting
from slime_like.planning.generation import Generation, predict_generation
from slime_like.planning.memory import GENERATION, WEIGHT_SYNC, PhaseMemory, engine_phase, trainer_phases
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.settings import Changes, changed
from slime_like.planning.step_time import StepTime, predict

_SHARES = (0.8, 0.85, 0.9)
"""Of a GPU's memory that are tried beside the configuration's; engines' default is about the last."""

_LEAST_LEFT = 2 * 2**30
"""GPU memory that an engine which is proposed leaves free."""

_WORTH = 0.9
"""A proposal shortens the step at least to this; less is within what is assumed."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Engines that fit: the settings that differ, their sampling, the whole step, and the phase with least left."""

    changes: Changes
    engine: EnginePlan
    generation: Generation
    step: StepTime
    tightest: PhaseMemory


def faster_engines(
    run: PlannedRun,
    estimated: Sequence[tuple[RankKind, RankEstimate]],
    transport: str | None,
    step: StepTime,
    references: float = 0.0,
) -> EngineChoice | None:
    """The engines with the shortest step on the same GPUs; none where the configuration's are about as fast."""
    found = _choices(run, estimated, transport, references)
    choices = sorted(found, key=lambda choice: (choice.step.total, len(choice.changes)))
    for choice in choices:
        if choice.step.total > _WORTH * step.total:
            return None
        if not _problems(changed(run, choice.changes)):
            return choice
    return None


def _choices(
    run: PlannedRun, estimated: Sequence[tuple[RankKind, RankEstimate]], transport: str | None, references: float
) -> Iterator[EngineChoice]:
    estimates = [estimate for _, estimate in estimated]
    for changes in _engine_changes(run):
        other = changed(run, changes)
        engine = plan_engine(other)
        if engine.longest_sequences < 1:
            continue
        phases = [phase for kind, one in estimated for phase in trainer_phases(other, engine, kind, one)]
        phases += [] if other.colocated else [engine_phase(other, engine)]
        tightest = min(phases, key=lambda phase: phase.margin)
        sampling = [phase for phase in phases if phase.phase in (GENERATION, WEIGHT_SYNC)]
        if tightest.fits and min(phase.margin for phase in sampling) >= _LEAST_LEFT:
            step = predict(other, estimates, engine, transport, references)
            yield EngineChoice(changes, engine, predict_generation(other, engine), step, tightest)


def _engine_changes(run: PlannedRun) -> Iterator[Changes]:
    config, rollout = run.config, run.config.rollout
    gpus = _engine_gpus(run)
    share, setting = engine_share(config), share_setting(config)
    adjustable = rollout.engine in SHARES and "kv_cache_memory_bytes" not in rollout.own_engine_args
    for tensor in divisors(config.cluster.gpus_per_node):
        if tensor > gpus:
            continue
        for value in {share, *(_SHARES if adjustable else ())}:
            wanted: Mapping[str, float] = {"rollout.num_engines": gpus // tensor, "rollout.tensor": tensor}
            now = {"rollout.num_engines": rollout.num_engines, "rollout.tensor": rollout.tensor, setting: share}
            different = {name: size for name, size in {**wanted, setting: value}.items() if size != now[name]}
            if different:
                yield {name: f"{size:g}" for name, size in different.items()}


def _engine_gpus(run: PlannedRun) -> int:
    """GPUs that engines may have: the trainers' if colocated, else the cluster's others."""
    config = run.config
    needed = checks.gpus_needed(config)
    if run.colocated:
        return needed.trainers
    if config.cluster.nodes is None:
        return needed.engines
    return config.cluster.nodes * config.cluster.gpus_per_node - needed.trainers - needed.references


def _problems(run: PlannedRun) -> list[str]:
    config = run.config
    found = map(str, check_settings(config, run.dimensions, training_needs(config) - {"code"}))
    return [*found, *checks.placement_problems(config)]
