"""Interface of checkpoint conversion: what ``slime-like convert`` requires from a trainer backend."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

Report = Callable[[int, int], None]
"""Callback that receives the bytes done and the total bytes."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options of a conversion.

    Attributes:
        dtype: type of the written weights; "auto" keeps each tensor's type.
        max_file_bytes: largest data file, unless a single parameter is larger.
        workers: number of threads; each holds one parameter in memory.
        allow_nan: also convert tensors with NaN or infinity.
        merge: write the model with its factors merged, not the factors.
    """

    dtype: DtypeChoice
    max_file_bytes: int
    workers: int
    allow_nan: bool
    merge: bool = False


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """Summary of the written files."""

    tensors: int
    nbytes: int
    files: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's type (torch's name without the prefix) and full shape."""

    dtype: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """A checkpoint's tensors under Hugging Face names. Safe to share between threads.

    Attributes:
        tensors: all tensors in the checkpoint.
        groups: the same names, grouped by what is read together.
    """

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    @property
    def groups(self) -> list[list[str]]: ...

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Return the values of the named tensors.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """


class Converter(Protocol):
    """Converter on disk between Hugging Face's format and a backend's format, for one model and layout: a backend makes
    it from the sections ``model`` and ``trainer``.

    Errors: ``CheckpointError`` lists the tensors. The output appears whole or not at all.
    """

    def prove(self) -> dict[str, tuple[int, ...]]:
        """Prove from shapes that each element of the model's tensors has exactly one place in the layout.

        Needs only ``config.json`` of ``model.path``.

        Returns:
            Shape of every tensor that a Hugging Face directory of the model must contain.

        Raises:
            CheckpointError: an element of a tensor has no place, or two.
        """

    def to_checkpoint(self, output: Path, options: ConversionOptions, report: Report) -> ConversionSummary:
        """Convert ``model.path`` to a checkpoint of this backend, in the layout ``trainer.parallel``."""

    def to_hugging_face(
        self, checkpoint: Path, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        """Convert a checkpoint of this backend, in any layout, to a Hugging Face directory, or factors to a PEFT one.

        Args:
            checkpoint: written by ``TrainerBackend.save`` or ``to_checkpoint``; ``model.path`` provides dimensions,
                configuration and tokenizer.
        """

    def open_checkpoint(self, checkpoint: Path) -> TensorSource:
        """Open a checkpoint of this backend for a comparison."""

    def open_hugging_face(self, directory: Path) -> TensorSource:
        """Open a Hugging Face directory of any family for a comparison."""
