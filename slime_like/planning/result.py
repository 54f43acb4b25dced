"""The result of planning."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_like.config import RunConfig
from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.engines import EnginePlan
from slime_like.planning.generation import Generation
from slime_like.planning.hardware import Hardware
from slime_like.planning.memory import HostMemory, Item, PhaseMemory
from slime_like.planning.planned_run import Workload
from slime_like.planning.step_time import LinkTraffic, StepTime
from slime_like.planning.units import memory_text

_CURE = "docs/tuning.md lists the settings that lower it, and slime-like plan --search the layouts that fit"


@dataclass(frozen=True, slots=True)
class KindPlan:
    """One kind of trainer ranks: what one of them is estimated at, its memory by phase, and what it sends in a step."""

    kind: RankKind
    estimate: RankEstimate
    phases: tuple[PhaseMemory, ...]
    traffic: tuple[LinkTraffic, ...]


@dataclass(slots=True)
class Plan:
    """Result of ``slime-like plan``.

    Attributes:
        recompute: layers of a stage that are recomputed.
        kinds, references: every kind of rank of the trainer, and of a reference worker; empty without workers, or
            where the layout itself is rejected.
        engine_phase: the GPU of an engine that has its own.
        problems: what keeps the run from this cluster, each with a remedy; empty where it may start.
        size_problems: of these, too few GPUs and too little memory.
        notes: what could not be judged here, or is worth knowing.
        seconds: that planning took.
    """

    hardware: Hardware
    nodes: int
    gpus_in_use: int
    recompute: int | str = "none"
    kinds: list[KindPlan] = field(default_factory=list)
    references: list[KindPlan] = field(default_factory=list)
    engine: EnginePlan | None = None
    engine_phase: PhaseMemory | None = None
    generation: Generation | None = None
    host: HostMemory | None = None
    workload: Workload | None = None
    step: StepTime | None = None
    transport: str | None = None
    problems: list[str] = field(default_factory=list)
    size_problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def phases(self) -> list[PhaseMemory]:
        phases = [phase for kind in (*self.kinds, *self.references) for phase in kind.phases]
        return phases + ([self.engine_phase] if self.engine_phase is not None else [])

    @property
    def tightest(self) -> PhaseMemory | None:
        """Phase with the least free memory."""
        return min(self.phases, key=lambda phase: phase.margin, default=None)

    def misfits(self, config: RunConfig) -> list[str]:
        """Describe what is too large."""
        return [f"{text}; {_CURE}" for text in self._misfits(config)]

    def _misfits(self, config: RunConfig) -> Iterator[str]:
        for phase in self.phases:
            if not phase.fits:
                needed, missing = memory_text(phase.total), memory_text(-phase.margin)
                yield (
                    f"GPU memory, {phase.place}: {needed} are needed, {missing} more than the GPU's "
                    f"{memory_text(phase.capacity)}; {_largest(phase.items)}"
                )
        if self.engine is not None and self.engine.longest_sequences < 1:
            yield (
                f"the KV cache of an engine holds {self.engine.kv_tokens:,} tokens, less than one sequence of "
                f"{config.max_model_len:,}"
            )
        if self.host is not None and not self.host.fits:
            yield (
                f"host memory: a node needs {memory_text(self.host.total)}, more than cluster.host_memory_gib="
                f"{config.cluster.host_memory_gib:g}; {_largest(self.host.items)}"
            )

    @property
    def fits(self) -> bool:
        """GPU memory suffices."""
        return all(phase.fits for phase in self.phases)

    @property
    def tokens_per_gpu_second(self) -> float:
        """Tokens, prompts included, that a step trains, per second and GPU in use."""
        if self.step is None or self.workload is None:
            return 0.0
        return self.workload.samples * self.workload.mean_length / self.step.total / self.gpus_in_use

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with sums and verdicts."""
        written = asdict(self)
        entries = [entry for kind in (*written["kinds"], *written["references"]) for entry in kind["phases"]]
        entries += [written["engine_phase"]] if self.engine_phase is not None else []
        for entry, phase in zip(entries, self.phases, strict=True):
            entry |= {"total": phase.total, "margin": phase.margin, "fits": phase.fits}
        if self.host is not None:
            checked = {"fits": self.host.fits} if self.host.capacity is not None else {}
            written["host"] |= {"total": self.host.total, **checked}
        if self.step is not None:
            written["step"]["total"] = self.step.total
        return {"verdict": "fits" if self.fits and not self.problems else "does not fit", **written}


def _largest(items: Sequence[Item]) -> str:
    largest = max(items, key=lambda item: item.nbytes)
    return f"most of it is {largest.name}, {memory_text(largest.nbytes)}"
