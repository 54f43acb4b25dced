"""Search for the fewest recomputed layers that fit, and for the fastest layouts that fit the same GPUs."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from slime_like.checks import training_needs
from slime_like.checks.check import check_settings
from slime_like.checks.engines import chosen_transport
from slime_like.checks.layout import divisors, layers_per_stage, layout_problems
from slime_like.config import ClusterConfig, ParallelConfig, RunConfig, TrainerConfig
from slime_like.config.filling import GpusNeeded, gpus_needed
from slime_like.config.trainer import FSDP
from slime_like.errors import ConfigError
from slime_like.interfaces import TrainerBackend
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.checks import placement_problems
from slime_like.planning.hardware import CONTEXT_BYTES
from slime_like.planning.memory import ACTIVATIONS, TRAINING, PhaseMemory, host_memory, plan_engine, trainer_phases
from slime_like.planning.planned_run import Note, PlannedRun, Workload, estimate_kinds, plannable_backend
from slime_like.planning.step_time import StepTime, predict_step

ERROR = 0.1
"""Share of planned activations that stays free, because real ranks differ by up to this share from the plan
(``tests/parallel/test_planned_memory.py``)."""

_FILLED = 0.9
"""Share of its token budget that the worst micro-batch fills at least."""
_SMALL = 0.1
"""Share of a GPU's memory that whole gradients may take without a plan."""
_GROUPS, _TRACED = 16, 1.8
"""Guesses for the order of the search: groups of a rank, and traced activations relative to their lower bound."""


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


def fill_memory(config: RunConfig) -> RunConfig:
    """Replace ``auto`` of settings that memory decides, for the memory of ``cluster.gpu``.

    ``trainer.recompute`` becomes the fewest layers that fit, or all if none do. ``trainer.fsdp.accumulate`` becomes
    ``whole`` if that fits, or else ``sharded``.
    """
    trainer = config.trainer
    if not trainer.is_planned:
        return config
    run = PlannedRun.of(config)
    if layout_problems(trainer.parallel, run.dimensions):
        return config
    if trainer.backend != FSDP or trainer.fsdp.accumulate != "auto":
        return _choose_recompute(run)[0].config
    # Nothing is traced for a small model.
    whole, gradients = _with_fsdp(run, "whole"), 4 * (run.factors or run.dimensions.num_parameters)
    if trainer.recompute != "auto" and gradients < _SMALL * run.hardware.memory_bytes:
        return whole.config
    found, fits = _choose_recompute(whole)
    return found.config if fits else _choose_recompute(_with_fsdp(run, "sharded"))[0].config


def _choose_recompute(run: PlannedRun) -> tuple[PlannedRun, bool]:
    """Return the run with the fewest recomputed layers, or its own number of them, and whether training fits."""
    backend, recompute = plannable_backend(run.config.trainer.backend), run.config.trainer.recompute
    if recompute != "auto":
        return run, _try_recompute(run, backend, recompute).spare >= 0
    fitted = fewest_recomputed(run, backend)
    return (with_recompute(run, "full"), False) if fitted is None else (fitted.run, True)


def _with_fsdp(run: PlannedRun, accumulate: str) -> PlannedRun:
    fsdp = run.config.trainer.fsdp.model_copy(update={"accumulate": accumulate})
    trainer = run.config.trainer.model_copy(update={"fsdp": fsdp})
    return replace(run, config=run.config.model_copy(update={"trainer": trainer}))


def fewest_recomputed(run: PlannedRun, backend: type[TrainerBackend]) -> Fitted | None:
    """Recompute as few layers of every stage as fit; ``None`` if training does not fit even with all recomputed.

    Memory is nearly linear in the number of layers, so each try interpolates between a number that is too small and one
    that fits.
    """
    none = _try_recompute(run, backend, "none")
    if none.spare >= 0:
        return none
    parallel, high = run.config.trainer.parallel, run.dimensions.num_layers
    if run.config.trainer.backend != FSDP:
        high = max(layers_per_stage(run.dimensions, parallel.pipeline * parallel.virtual_pipeline))
    low, fails, fits = 0, none, _try_recompute(run, backend, high)
    if fits.spare < 0:
        return None
    while high - low > 1:
        share = fails.spare / (fails.spare - fits.spare)
        number = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        tried = _try_recompute(run, backend, number)
        low, fails, high, fits = (low, fails, number, tried) if tried.spare >= 0 else (number, tried, high, fits)
    return fits


def with_recompute(run: PlannedRun, recompute: int | str) -> PlannedRun:
    trainer = run.config.trainer.model_copy(update={"recompute": recompute})
    return replace(run, config=run.config.model_copy(update={"trainer": trainer}))


def _try_recompute(run: PlannedRun, backend: type[TrainerBackend], recompute: int | str) -> Fitted:
    run = with_recompute(run, recompute)
    engine = plan_engine(run) if run.config.starts_engines else None
    found: list[tuple[RankKind, RankEstimate]] = []
    phases: list[PhaseMemory] = []
    kinds = backend.planner().rank_kinds(run.config.trainer)
    # The first stage has the most micro-batches in flight, and the last one the head.
    for kind in dict.fromkeys((kinds[0], kinds[-1])):
        found += estimate_kinds(run.config, backend, [kind])
        phases += trainer_phases(run, engine, *found[-1])
        if min(map(_spare, phases)) < 0:
            break
    return Fitted(run, found, phases, min(map(_spare, phases)))


def _spare(phase: PhaseMemory) -> float:
    if phase.phase != TRAINING:
        return math.inf
    return phase.margin - ERROR * phase.items[ACTIVATIONS]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, with its phase of least free memory and its predicted step."""

    trainer: TrainerConfig
    tightest: PhaseMemory
    step: StepTime

    @property
    def flags(self) -> str:
        fields = ("tensor", "sequence", "pipeline", "virtual_pipeline", "context", "data", "expert")
        sizes = [f"--trainer.parallel.{name} {str(getattr(self.trainer.parallel, name)).lower()}" for name in fields]
        sizes += [
            f"--trainer.{name} {getattr(self.trainer, name)}" for name in ("target_tokens_per_batch", "recompute")
        ]
        return " ".join(sizes)

    def to_json(self) -> dict[str, Any]:
        trainer = self.trainer.model_dump(mode="json", include={"parallel", "target_tokens_per_batch", "recompute"})
        details = {"tightest": asdict(self.tightest), "step": asdict(self.step), "flags": self.flags}
        return {**trainer, **details, "margin": self.tightest.margin, "total": self.step.total}


def search(run: PlannedRun, wanted: int, note: Note = lambda _: None) -> list[Candidate]:
    """Return the ``wanted`` fastest layouts that fit, sorted by predicted time.

    Layouts that could fit are traced in the order of a rough guess of their time until twice as many as are wanted fit.

    Raises:
        ConfigError: problems of the run that no layout solves.
    """
    if run.config.trainer.backend == FSDP:
        problem = "trainer.backend=fsdp: --search varies tensor, pipeline and expert ranks, which fsdp lacks"
        remedy = "plan single values of trainer.parallel.context and data"
        raise ConfigError(f"{problem}; {remedy}", code="backend-not-searched")
    backend = plannable_backend(run.config.trainer.backend)
    room = run.hardware.memory_bytes - CONTEXT_BYTES
    possible = [layout for layout in _layouts(run) if sum(least_bytes(layout)[::2]) < room]
    possible.sort(key=_rough_time)
    found: list[Candidate] = []
    rejections: list[list[str]] = []
    for index, tried in enumerate(possible, start=1):
        note(f"layout {index} of {len(possible)}, {len(found)} fit")
        config = tried.config
        settings = check_settings(config, tried.dimensions, training_needs(config) - {"code"})  # code does not vary
        if problems := [*map(str, settings), *placement_problems(config)]:
            rejections.append(problems)
        elif candidate := _candidate(tried, backend):
            found.append(candidate)
        if len(found) == 2 * wanted:
            break
    if rejections and len(rejections) == len(possible):
        shared = [text for text in rejections[0] if all(text in other for other in rejections)]
        raise ConfigError(shared or rejections[0], code="plan-rejected")
    return sorted(found, key=lambda candidate: candidate.step.total)[:wanted]


def trainer_gpus(needed: GpusNeeded, cluster: ClusterConfig) -> int:
    """Return how many GPUs of the cluster are left by engines and workers, or, if the cluster has no given size, how
    many the given layout uses."""
    if cluster.nodes is None:
        return needed.trainers
    return cluster.nodes * cluster.gpus_per_node - (needed.total - needed.trainers)


def _layouts(run: PlannedRun) -> Iterator[PlannedRun]:
    config, per_node = run.config, run.config.cluster.gpus_per_node
    gpus = trainer_gpus(gpus_needed(config), config.cluster)
    samples = config.rollout.prompts_per_step // config.algorithm.minibatches
    samples *= config.samples_per_row
    experts = divisors(run.dimensions.num_experts) if run.dimensions.num_experts else [1]
    for tensor in divisors(per_node):
        for pipeline in divisors(gpus // tensor):
            for context in divisors(gpus // (tensor * pipeline)):
                data, rest = divmod(gpus, tensor * pipeline * context)
                if rest or data > samples or context > 2 * per_node:
                    continue
                for expert in (size for size in experts if size <= tensor * context * data):
                    parallel = ParallelConfig(
                        tensor=tensor, pipeline=pipeline, context=context, data=data, expert=expert, sequence=tensor > 1
                    )
                    if not layout_problems(parallel, run.dimensions):
                        for tokens in {config.trainer.target_tokens_per_batch, config.longest_row}:
                            update = {"parallel": parallel, "target_tokens_per_batch": tokens}
                            changed = config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})
                            workload = Workload.of(changed, run.workload.mean_prompt, run.workload.lengths)
                            yield replace(run, config=changed, workload=workload)


def least_bytes(run: PlannedRun) -> tuple[float, float, float]:
    """Return lower bounds of a rank's memory, computed without tracing it.

    Returns:
        Weights, gradients and optimizer state of an even share; and 16-bit activations that the first stage keeps for
        backward, of all micro-batches in flight: without recomputation the inputs of matrix products, attention and
        SwiGLU, and with full recomputation the inputs of layers.
    """
    config, dimensions, layout = run.config, run.dimensions, run.config.trainer.parallel
    hidden, routed = dimensions.hidden_size, 3 * dimensions.moe_ffn_hidden_size
    experts = len(dimensions.expert_layers) * dimensions.num_experts * hidden * routed
    parameters = (dimensions.num_parameters - experts) / layout.tensor
    parameters += experts / (layout.expert if layout.expert > 1 else layout.tensor)
    trained = 0 if config.model.lora.is_set else 4
    sharded = 0 if config.trainer.optimizer.offload or not trained else 12 / (layout.context * layout.data)
    attention = hidden + 2 * dimensions.value_dim * (dimensions.num_heads + dimensions.num_kv_heads)
    products = [dimensions.moe_top_k * (hidden + routed)] * bool(dimensions.expert_layers)
    products += [hidden + 3 * dimensions.ffn_hidden_size] * (len(dimensions.expert_layers) < dimensions.num_layers)
    layers = dimensions.num_layers // layout.pipeline
    in_flight = min(Workload.of(config).micro_batches, layout.pipeline)
    tokens = _FILLED * config.trainer.target_tokens_per_batch / (layout.context * layout.tensor) * in_flight
    state = parameters / layout.pipeline * (2 + trained + sharded)
    return state, 2 * tokens * layers * (attention + min(products)), 2 * tokens * layers * hidden


def _rough_time(run: PlannedRun) -> float:
    """Guess the seconds of training, as a sort key: layers' products, attention or the context's keys and values, other
    messages, recomputation and idle stages."""
    config, dimensions, hardware = run.config, run.dimensions, run.hardware
    layout, workload = config.trainer.parallel, run.workload
    state, kept, inputs = least_bytes(run)
    free = hardware.memory_bytes - hardware.process_bytes(_GROUPS) - state
    free -= plan_engine(run).sleeping_bytes if run.colocated and run.config.starts_engines else 0
    # The share of layers that probably must be recomputed adds as many forwards.
    forwards = (2 if config.model.lora.is_set else 3) + min(1.0, max(0.0, (kept - free / _TRACED) / (kept - inputs)))
    tokens = config.trainer.target_tokens_per_batch / layout.context
    heads = dimensions.num_heads * dimensions.head_dim / layout.tensor
    cached = max(1.0, dimensions.num_kv_heads / layout.tensor) * 2 * dimensions.head_dim * run.element_bytes * tokens
    hidden = dimensions.hidden_size * run.element_bytes * tokens / layout.tensor
    parameters = dimensions.active_parameters / dimensions.num_layers / layout.tensor
    products = hardware.matmul_seconds(2 * forwards * parameters * tokens)
    attention = hardware.attention_seconds(2 * forwards * workload.attention_length * heads * tokens)
    # Keys and values are exchanged in forward, and together with their gradients in backward.
    ring = range(0, layout.tensor * layout.context, layout.tensor)
    context = hardware.link_seconds(4 * (layout.context - 1) * cached, ring, calls=0)
    # Each forward has four gathers and scatters, and backward has two that no product hides.
    sent = (4 * (forwards - 2) + 2) * (layout.tensor - 1) * hidden
    messages = hardware.link_seconds(sent, range(layout.tensor), calls=0)
    # Tokens travel to their experts and back.
    routed = 2 * (forwards - 1) * (layout.expert - 1) / layout.expert * dimensions.moe_top_k * hidden
    messages += hardware.link_seconds(routed, range(layout.expert), "all_to_all", 0)
    slots = workload.micro_batches + layout.pipeline - 1
    return slots * dimensions.num_layers / layout.pipeline * (products + max(attention, context) + messages)


def _candidate(run: PlannedRun, backend: type[TrainerBackend]) -> Candidate | None:
    """Return the layout with the fewest recomputed layers, or ``None`` if it does not fit."""
    fitted = fewest_recomputed(run, backend)
    if fitted is None or not all(phase.fits for phase in fitted.phases):
        return None
    run, estimates = fitted.run, [estimate for _, estimate in fitted.found]
    engine, transport = plan_engine(run) if run.config.starts_engines else None, None
    if engine is not None:
        with contextlib.suppress(ConfigError):  # a problem of every layout, which the plan reports
            cluster = run.config.cluster
            nodes = cluster.nodes or gpus_needed(run.config).nodes(cluster.gpus_per_node)
            transport = chosen_transport(run.config, on_cuda=True, num_hosts=nodes)
    if not host_memory(run, estimates, engine, transport).fits:
        return None
    tightest = min(fitted.phases, key=lambda phase: phase.margin)
    return Candidate(run.config.trainer, tightest, predict_step(run, estimates, engine, transport))
