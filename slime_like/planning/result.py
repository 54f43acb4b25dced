"""The result of planning."""

from dataclasses import asdict, dataclass, field
from typing import Any

from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.engines import EnginePlan
from slime_like.planning.hardware import Hardware
from slime_like.planning.memory import HostMemory, PhaseMemory
from slime_like.planning.planned_run import Workload
from slime_like.planning.step_time import LinkTraffic, StepTime


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
        kinds, references: every kind of rank of the trainer, and of a reference worker; empty without workers, or
            where the layout itself is rejected.
        engine_phase: the GPU of an engine that has its own.
        problems: what keeps the run from this cluster, each with a remedy; empty where it may start.
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
    host: HostMemory | None = None
    workload: Workload | None = None
    step: StepTime | None = None
    transport: str | None = None
    problems: list[str] = field(default_factory=list)
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
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases)

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
