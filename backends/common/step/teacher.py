"""A teacher's output projection next to the policy's: its hidden states travel instead of its logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from backends.common.hugging_face.files import HfCheckpoint
from backends.common.process.agreement import rank_error
from backends.common.step.packs import ResponseRows
from slime_like.algorithms.divergence import Head, fused_reverse_kl
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
    def read(
        cls,
        path: Path,
        start: int,
        rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        factor: float = 1.0,
        softcap: float | None = None,
    ) -> Self:
        """Read ``rows`` from ``start`` on of a Hugging Face checkpoint's head, or of the embedding if they are tied.

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
            weight = torch.zeros(rows, shapes[name][1], dtype=dtype, device=device)
            if (held := min(rows, vocab_size - start)) > 0:
                weight[:held] = checkpoint.read(name, 0, start, held).to(dtype)
        return cls(weight, factor, softcap)

    @classmethod
    def planned(cls, path: Path, rows: int, dtype: torch.dtype) -> Self:
        """Return the shapes of this many rows. Needs only ``config.json``."""
        width = ModelDimensions.from_checkpoint(path).hidden_size
        return cls(torch.empty(rows, width, dtype=dtype, device="meta"))

    def divergence(self, student: Head, rows: ResponseRows, **shard: Any) -> Tensor:
        """Return the (r,) KL of the student to the teacher at ``rows``; ``shard``: see ``fused_reverse_kl``."""
        if rows.teacher is None:
            raise rank_error(
                "accumulate",
                "a pack has no hidden states of the teacher",
                code="no-teacher-hidden",
                remedy="score it first, or train on rollouts that were saved with them",
            )
        hidden = rows.teacher.to(self.weight.dtype)
        return fused_reverse_kl(
            student, Head(hidden, self.weight, rows.temperatures / self.factor, self.softcap), **shard
        )


def add_planned(rows: ResponseRows | None, teacher: TeacherHead | None) -> None:
    """Give a planned micro-batch the shapes of its teacher's hidden states."""
    if rows is not None and teacher is not None:
        rows.teacher = torch.empty(len(rows.targets), teacher.weight.shape[1], device="meta")
