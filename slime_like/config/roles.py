"""Models of a run, by what they are for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_like.config.trainer import ParallelConfig

POLICY, REFERENCE, TEACHER, CRITIC = "policy", "reference", "distillation", "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRole:
    """One model of a run: its weights, its scores, and where it computes them.

    Attributes:
        name: key in the run's ``roles``; begins with its section, and names its ranks, logs and files.
        path: Hugging Face checkpoint with its weights; ``None``: the policy's first weights.
        fields: pack fields (``TensorField``) that hold its scores, in the order of its head's outputs. A head's further
            outputs are dropped.
        trained, scores: whether optimizer steps change it; whether trainer ranks score every batch with it first.
        head: what it computes for each response token: if it is trained, a key of
            ``backends.common.step.objective.LOSSES_OF_HEADS``; if not, perhaps "hidden", its last hidden state.
        placement: ``trainer``: the policy's ranks hold it. ``workers``: separate ranks score groups during sampling.
            ``ranks``: it has its own trainer ranks.
        parallel: layout of its trainer ranks, or of each worker.
        workers, max_restarts: number of its workers, and their restarts in a run. Ranks on their own devices are one.
        source: the only source of the mixture that it scores; ``None``: all rows.
    """

    name: str
    path: Path | None
    fields: tuple[str, ...]
    trained: bool = False
    scores: bool = False
    head: str = "logprob"
    placement: Literal["trainer", "workers", "ranks"] = "trainer"
    parallel: ParallelConfig
    workers: int = 0
    max_restarts: int = 0
    source: str | None = None

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def setting(self) -> str:
        """Name of the setting with its path."""
        return f"{self.name}.path" if self.source is None else self.name


class Roles(dict[str, ModelRole]):
    """Models of a run by name."""

    @property
    def held(self) -> list[ModelRole]:
        """Frozen roles that the policy's ranks hold next to it."""
        return [role for role in self.values() if not role.trained and role.placement == "trainer"]

    @property
    def scoring(self) -> list[ModelRole]:
        """Roles that the policy's ranks score every batch with."""
        return [role for role in self.values() if role.scores and role.placement == "trainer"]

    @property
    def with_workers(self) -> list[ModelRole]:
        """Frozen roles whose workers score groups while others are sampled."""
        return [role for role in self.values() if role.workers and not role.trained]

    @property
    def placed(self) -> list[ModelRole]:
        """Role of each worker, and of ranks on devices of their own."""
        return [role for role in self.values() for _ in range(role.workers)]
