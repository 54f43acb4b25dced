"""The result of planning."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.engine_search import EngineChoice
from slime_like.planning.engines import EnginePlan
from slime_like.planning.generation import Generation
from slime_like.planning.hardware import Hardware
from slime_like.planning.memory import HostMemory, PhaseMemory
from slime_like.planning.planned_run import Workload
from slime_like.planning.settings import Changes
from slime_like.planning.step_time import LinkTraffic, StepTime


@dataclass(frozen=True, slots=True)
class KindPlan:
    """One kind of trainer ranks: what one of them is estimated at, its memory by phase, and what it sends in a step."""

    kind: RankKind
    estimate: RankEstimate
    phases: tuple[PhaseMemory, ...]
    traffic: tuple[LinkTraffic, ...]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings with which a run fits that does not; found and checked by planning it with them.

    Attributes:
        changes: fields and values; empty where no settings fit.
        reason: why no settings fit; "" otherwise.
        tightest, seconds, host_bytes: with the changes: the phase with least free memory, the predicted step, and
            the host memory of a node.
    """

    changes: Changes
    reason: str = ""
    tightest: PhaseMemory | None = None
    seconds: float = 0.0
    host_bytes: int = 0


@dataclass(slots=True)
class Plan:
    """Result of ``slime-like plan``.

    Attributes:
        kinds, references: every kind of rank of the trainer, and of a reference worker; empty without workers, or
            where the layout itself is rejected.
        engine_phase: the GPU of an engine that has its own.
        faster_engines: other engines on the same GPUs, where generation dominates and they would shorten it.
        problems: what keeps the run from this cluster, each with a remedy; empty where it may start.
        size_problems: of these, what other layouts and settings may cure: too few GPUs, too little memory.
        cures: of what is too large, the settings that make it smaller.
        remedy: settings that cure them; none where there is nothing to cure, or other problems as well.
        notes: what could not be judged here, or is worth knowing.
        seconds: that planning took.
    """

    hardware: Hardware
    nodes: int
    gpus_in_use: int
    kinds: list[KindPlan] = field(default_factory=list)
    references: list[KindPlan] = field(default_factory=list)
    engine: EnginePlan | None = None
    engine_phase: PhaseMemory | None = None
    generation: Generation | None = None
    faster_engines: EngineChoice | None = None
    host: HostMemory | None = None
    workload: Workload | None = None
    step: StepTime | None = None
    transport: str | None = None
    problems: list[str] = field(default_factory=list)
    size_problems: list[str] = field(default_factory=list)
    cures: Mapping[str, str] = field(default_factory=dict)
    remedy: Remedy | None = None
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

    @property
    def described(self) -> list[str]:
        """The problems, with what makes smaller what is too large."""
        return [f"{text}; {self.cures[text]}" if text in self.cures else text for text in self.problems]

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
