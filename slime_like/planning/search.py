"""Layouts of the same GPUs that fit, fastest first."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slime_like.checks.check import check_settings
from slime_like.checks.definition import training_needs
from slime_like.checks.layout import divisors, layout_problems
from slime_like.checks.transport import chosen_transport
from slime_like.config import ParallelConfig, RunConfig
from slime_like.config.trainer import FSDP
from slime_like.errors import ConfigError
from slime_like.interfaces import TrainerBackend
from slime_like.planning import checks
from slime_like.planning.bounds import least_bytes, least_kept_bytes
from slime_like.planning.engines import plan_engine
from slime_like.planning.estimates import Note, plannable_backend
from slime_like.planning.hardware import CONTEXT_BYTES
from slime_like.planning.memory import PhaseMemory, host_memory
from slime_like.planning.planned_run import PlannedRun, Workload
from slime_like.planning.recompute import fewest_recomputed, with_recompute
from slime_like.planning.step_time import StepTime, predict

_GROUPS = 16
_UNSEEN = 0.8
"""Groups of a rank, and activations beyond their bound, as a share of it, that the order of the search counts with."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, with engines; its phase with least memory left, and the predicted step.

    Attributes:
        tokens: of a micro-batch (``trainer.target_tokens_per_batch``).
        engines: their number and GPUs each, e.g. "8 x 4"; "" if the run has none.
    """

    parallel: ParallelConfig
    tokens: int
    recompute: str | int
    engines: str
    tightest: PhaseMemory
    step: StepTime

    @property
    def seconds(self) -> float:
        """The trainer's part of the step."""
        return self.step.scoring + self.step.training

    @property
    def flags(self) -> str:
        """The layout as flags."""
        fields = ("tensor", "sequence", "pipeline", "virtual_pipeline", "context", "data", "expert")
        sizes = [f"--trainer.parallel.{name} {str(getattr(self.parallel, name)).lower()}" for name in fields]
        sizes += [f"--trainer.target_tokens_per_batch {self.tokens}", f"--trainer.recompute {self.recompute}"]
        return " ".join(sizes)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with derived figures."""
        return {
            **asdict(self),
            "parallel": self.parallel.model_dump(),
            "seconds": self.seconds,
            "margin": self.tightest.margin,
            "flags": self.flags,
        }


def search(run: PlannedRun, wanted: int, note: Note = lambda _: None) -> list[Candidate]:
    """The ``wanted`` fastest layouts that fit, of all that the trainer's GPUs admit.

    Layouts that could fit are tried in the order of a rough guess of their time, each followed in full, until twice as
    many as are wanted fit. The order of the result is that of the predicted time.

    Raises:
        ConfigError: what keeps the run from starting under every one of them.
    """
    if run.config.trainer.backend == FSDP:
        raise ConfigError(
            "--search goes over tensor, pipeline and expert ranks, which trainer.backend=fsdp does not have; plan "
            "single values of trainer.parallel.context and data instead",
            code="backend-not-searched",
        )
    backend = plannable_backend(run.config)
    possible = [tried for tried in _admitted(run) if _room(tried, "full") > 0]
    found: list[Candidate] = []
    refusals: list[list[str]] = []
    for index, tried in enumerate(sorted(possible, key=_rough_time), start=1):
        note(f"layout {index} of {len(possible)}, {len(found)} fit")
        if problems := _problems(tried):
            refusals.append(problems)
            continue
        if candidate := _candidate(tried, backend):
            found.append(candidate)
        if len(found) == 2 * wanted:
            break
    if refusals and len(refusals) == len(possible):
        raise ConfigError(_shared(refusals), code="plan-rejected")
    return sorted(found, key=lambda candidate: candidate.step.total)[:wanted]


def trainer_gpus(config: RunConfig) -> int:
    """GPUs that the search lays out: the cluster's, without those of engines and reference workers; the layout's own
    where no size is given."""
    needed, cluster = checks.gpus_needed(config), config.cluster
    if cluster.nodes is None:
        return needed.trainers
    return cluster.nodes * cluster.gpus_per_node - needed.engines - needed.references


def _admitted(run: PlannedRun) -> Iterator[PlannedRun]:
    config, per_node = run.config, run.config.cluster.gpus_per_node
    gpus, samples = trainer_gpus(config), config.rollout.prompts_per_step // config.algorithm.minibatches
    samples *= 1 if config.supervised else config.rollout.samples_per_prompt
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
                            yield _with(run, parallel, tokens)


def _with(run: PlannedRun, parallel: ParallelConfig, tokens: int) -> PlannedRun:
    trainer = run.config.trainer.model_copy(update={"parallel": parallel, "target_tokens_per_batch": tokens})
    config = run.config.model_copy(update={"trainer": trainer})
    return replace(
        run, config=config, workload=Workload.of(config, run.workload.mean_prompt, run.workload.mean_response)
    )


def _problems(run: PlannedRun) -> list[str]:
    config = run.config
    settings = check_settings(config, run.dimensions, training_needs(config) - {"code"})  # the same for all
    return [*map(str, settings), *checks.placement_problems(config)]


def _shared(refusals: Sequence[list[str]]) -> list[str]:
    """Return the problems common to all, else those of the first."""
    first, *others = refusals
    return [text for text in dict.fromkeys(first) if all(text in other for other in others)] or first


def _rough_time(run: PlannedRun) -> float:
    """Guess the seconds of training, as a sort key: layers' products, attention or the context's keys and values, other
    messages, recomputation and idle stages."""
    config, dimensions, hardware = run.config, run.dimensions, run.hardware
    layout, workload = config.trainer.parallel, Workload.of(config)
    forwards = 3 + _likely_recomputed(run)
    tokens = config.trainer.target_tokens_per_batch / layout.context
    heads = dimensions.num_heads * dimensions.head_dim / layout.tensor
    cached = max(1.0, dimensions.num_kv_heads / layout.tensor) * 2 * dimensions.head_dim * run.element_bytes * tokens
    hidden = dimensions.hidden_size * run.element_bytes * tokens * (layout.tensor - 1) / layout.tensor
    parameters = dimensions.active_parameters / dimensions.num_layers / layout.tensor
    products = hardware.matmul_seconds(2 * forwards * parameters * tokens)
    attention = hardware.attention_seconds(2 * forwards * workload.attention_length * heads * tokens)
    # Keys and values go round in forward, and with their gradients in backward.
    context = hardware.link_seconds(
        4 * (layout.context - 1) * cached, range(0, layout.tensor * layout.context, layout.tensor)
    )
    # Four gathers and scatters in each forward, and two in backward that no product hides.
    messages = hardware.link_seconds((4 * (forwards - 2) + 2) * hidden, range(layout.tensor))
    if layout.expert > 1:  # tokens go to their experts and come back
        routed = dimensions.moe_top_k * dimensions.hidden_size * run.element_bytes * tokens / layout.tensor
        share = (layout.expert - 1) / layout.expert
        messages += hardware.link_seconds(2 * (forwards - 1) * share * routed, range(layout.expert))
    slots = workload.micro_batches + layout.pipeline - 1
    return slots * dimensions.num_layers / layout.pipeline * (products + max(attention, context) + messages)


def _likely_recomputed(run: PlannedRun) -> float:
    """Guess the share of layers that must be recomputed, of bounds as far below what is traced as they mostly are."""
    taken = run.hardware.process_bytes(_GROUPS)
    taken += plan_engine(run).sleeping_bytes if run.colocated and run.has_engines else 0
    none, full = (
        _room(run, recompute) - taken - _UNSEEN * least_kept_bytes(with_recompute(run, recompute))
        for recompute in ("none", "full")
    )
    return min(1.0, max(0.0, none / (none - full)))


def _room(run: PlannedRun, recompute: str) -> float:
    """Return GPU memory that is left at most."""
    return run.hardware.memory_bytes - CONTEXT_BYTES - least_bytes(with_recompute(run, recompute))


def _candidate(run: PlannedRun, backend: type[TrainerBackend]) -> Candidate | None:
    """Return the layout with the fewest recomputed layers, or ``None`` if it does not fit."""
    fitted = fewest_recomputed(run, backend)
    if fitted is None or not all(phase.fits for phase in fitted.phases):
        return None
    run, found, phases = fitted.run, fitted.found, fitted.phases
    config, engine = run.config, plan_engine(run) if run.has_engines else None
    estimates = [estimate for _, estimate in found]
    transport = None
    if engine is not None:
        with contextlib.suppress(ConfigError):  # none reaches, whatever the layout
            transport = chosen_transport(config, on_cuda=True, num_hosts=checks.planned_nodes(config))
    step = predict(run, estimates, engine, transport)
    tightest = min(phases, key=lambda phase: phase.margin)
    if not host_memory(run, estimates, engine, transport).fits:
        return None
    rollout = run.config.rollout
    engines = "" if engine is None else f"{rollout.num_engines} x {rollout.tensor}"
    trainer = config.trainer
    sizes = trainer.parallel, trainer.target_tokens_per_batch, trainer.recompute
    return Candidate(*sizes, engines, tightest, step)
