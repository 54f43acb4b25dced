"""A teacher's output projection next to the policy's: its hidden states travel instead of its logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from backends.common.hugging_face.files import HfCheckpoint
from backends.common.process.agreement import rank_error, together
from backends.common.step.packs import ResponseRows
from slime_like.algorithms.head import Head, fused_reverse_kl
from slime_like.config.sections import DistillationConfig, ModelConfig
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import EMBEDDING, HEADS, ModelDimensions


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """The rows of a teacher's output projection that this rank's columns of the vocabulary need.

    Attributes:
        weight: (V_local, H_teacher), with 0 for the vocabulary's padding.
        factor, softcap: factor of its logits, and their cap.
    """

    weight: Tensor
    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def read(cls, path: Path, columns: range, vocab_size: int, like: torch.Tensor, *scaling: Any) -> Self:
        """Read the ``columns``' rows of a Hugging Face checkpoint's head, or of the embedding if they are tied, in the
        type and on the device of ``like``. ``scaling``: factor and cap of the logits.

        Raises:
            CheckpointError: it has no such matrix, another vocabulary, or a bias.
        """
        with HfCheckpoint(path) as checkpoint:
            shapes = checkpoint.shapes()
            name = next((each for each in (*HEADS, EMBEDDING) if each in shapes), None)
            if name is None or shapes[name][0] != vocab_size or f"{name.removesuffix('weight')}bias" in shapes:
                raise CheckpointError(
                    f"it has no output projection of {vocab_size} tokens without a bias (found: {name})",
                    code="no-teacher-head",
                    who=str(path),
                    remedy="use a teacher with the policy's vocabulary, or distillation.mode: sampled",
                )
            weight = like.new_zeros(len(columns), shapes[name][1])
            if (held := min(len(columns), vocab_size - columns.start)) > 0:
                weight[:held] = checkpoint.read(name, 0, columns.start, held)
        return cls(weight, *scaling)


class Teachers(dict[str | None, TeacherHead]):
    """Heads by the source of the rows that they teach; by ``None``, the head for all rows."""

    def divergence(self, student: Sequence[Any], rows: ResponseRows, **shard: Any) -> Tensor:
        """Return the (r,) KL of the student to the teacher at ``rows``.

        Args:
            student: the arguments of its ``Head``.
            shard: see ``fused_reverse_kl``.
        """
        head = self.get(rows.source, self.get(None))
        if head is None or rows.teacher is None:
            raise rank_error(
                "accumulate",
                f"a pack of the source {rows.source} has no hidden states of a teacher",
                code="no-teacher-hidden",
                remedy="score it first, or train on rollouts that were saved with them",
            )
        hidden, temperatures = rows.teacher.to(head.weight.dtype), rows.temperatures / head.factor
        return fused_reverse_kl(Head(*student), Head(hidden, head.weight, temperatures, head.softcap), **shard)

    @property
    def nbytes(self) -> int:
        return sum(head.weight.nbytes for head in self.values())

    @classmethod
    def planned(cls, settings: DistillationConfig, rows: int, dtype: torch.dtype) -> Self:
        """Return the shapes of this many rows of each head, if the KL is exact. Needs only ``config.json``."""
        found = cls()
        for source, path in settings.paths.items() if settings.exact_coef > 0 else ():
            width = ModelDimensions.from_checkpoint(path).hidden_size
            found[source] = TeacherHead(torch.empty(rows, width, dtype=dtype, device="meta"))
        return found

    def add_planned(self, rows: ResponseRows | None) -> None:
        """Give a planned micro-batch the shapes of its teacher's hidden states, which is the widest."""
        if rows is not None and self:
            rows.source = max(self, key=lambda source: self[source].weight.shape[1])
            rows.teacher = torch.empty(len(rows.targets), self[rows.source].weight.shape[1], device="meta")


def hold_teachers(models: Any, settings: DistillationConfig, own: ModelConfig, device: torch.device) -> list[Tensor]:
    """Give every model its rows of the teachers' output projections, and return all these. Collective.

    A model's ``teacher_rows`` returns the arguments of ``TeacherHead.read`` after the path; ``None`` without a head.
    """

    def read() -> None:
        for model in models:
            model.teachers = Teachers()
            for source, path in settings.paths.items():
                if (place := model.teacher_rows(path, own, device)) is not None:
                    model.teachers[source] = TeacherHead.read(path, *place)

    together(read, "loading teachers", device)
    return [head.weight for model in models for head in model.teachers.values()]
