"""The result of planning."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_like.interfaces.estimate import RankEstimate, RankKind
from slime_like.planning.engines import EnginePlan, Generation
from slime_like.planning.memory import HostMemory, PhaseMemory
from slime_like.planning.planned_run import PlannedRun
from slime_like.planning.step_time import StepTime
from slime_like.planning.units import memory_text

_CURE = "docs/tuning.md lists the settings that lower it, and slime-like plan --search the layouts that fit"


@dataclass(frozen=True, slots=True)
class KindPlan:
    """One kind of ranks: the estimate of one of them, and its memory by phase."""

    kind: RankKind
    estimate: RankEstimate
    phases: tuple[PhaseMemory, ...]


@dataclass(slots=True)
class Plan:
    """Result of ``slime-like plan``.

    Attributes:
        run: the planned run, with the chosen number of recomputed layers.
        kinds, references: every kind of rank of the trainer, and of roles' workers; empty without workers, or if the
            layout itself is rejected.
        engine_phase: contents of a separate engine's GPU.
        problems: reasons why the run cannot start on this cluster, each with a remedy.
        notes: facts that could not be checked here, or are worth knowing.
        seconds: duration of planning.
    """

    run: PlannedRun
    nodes: int
    gpus_in_use: int
    kinds: list[KindPlan] = field(default_factory=list)
    references: list[KindPlan] = field(default_factory=list)
    engine: EnginePlan | None = None
    engine_phase: PhaseMemory | None = None
    generation: Generation | None = None
    host: HostMemory | None = None
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
    def fits(self) -> bool:
        """True if GPU memory suffices, including a KV cache for one sequence of the maximum length."""
        holds_one = self.engine is None or self.engine.longest_sequences > 0
        return holds_one and all(phase.fits for phase in self.phases)

    def misfits(self) -> Iterator[str]:
        config = self.run.config
        for phase in self.phases:
            if not phase.fits:
                needed, missing = memory_text(phase.total), memory_text(-phase.margin)
                yield (
                    f"GPU memory, {phase.place}: {needed} are needed, {missing} more than the GPU's "
                    f"{memory_text(phase.capacity)}; {_largest(phase.items)}; {_CURE}"
                )
        if self.engine is not None and self.engine.longest_sequences < 1:
            yield (
                f"rollout.max_model_len={config.max_model_len}: an engine's KV cache holds {self.engine.kv_tokens:,} "
                f"tokens, less than one sequence; {_CURE}"
            )
        if self.host is not None and not self.host.fits:
            yield (
                f"cluster.host_memory_gib={config.cluster.host_memory_gib:g}: a node needs "
                f"{memory_text(self.host.total)} of host memory; {_largest(self.host.items)}; {_CURE}"
            )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with sums and verdicts."""
        written = asdict(self)
        run = written.pop("run")
        written |= {name: run[name] for name in ("hardware", "workload")}
        written["recompute"] = self.run.config.trainer.recompute
        entries = [entry for kind in (*written["kinds"], *written["references"]) for entry in kind["phases"]]
        entries += [written["engine_phase"]] if self.engine_phase is not None else []
        for entry, phase in zip(entries, self.phases, strict=True):
            entry |= {"total": phase.total, "margin": phase.margin, "fits": phase.fits}
        if self.host is not None:
            checked = {"fits": self.host.fits} if self.host.capacity is not None else {}
            written["host"] |= {"total": self.host.total, **checked}
        if self.step is not None:
            written["step"]["total"] = self.step.total
        return {"verdict": "does not fit" if self.problems else "fits", **written}


def _largest(items: dict[str, int]) -> str:
    name, nbytes = max(items.items(), key=lambda item: item[1])
    return f"most of it is {name}, {memory_text(nbytes)}"
