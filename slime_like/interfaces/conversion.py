"""The border to whatever converts checkpoints: what ``slime-like convert`` asks of a trainer backend."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from slime_like.config import RunConfig

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options of a conversion.

    Attributes:
        dtype: of the weights that are written; "auto" keeps every tensor's.
        max_file_bytes: largest data file, unless one parameter alone is larger.
        workers: threads; each holds one parameter in memory.
        allow_nan: convert tensors with NaN or infinity, too.
    """

    dtype: DtypeChoice
    max_file_bytes: int
    workers: int
    allow_nan: bool


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """Summary of the written files; ``reused`` of the ``files`` were there from an interrupted start."""

    tensors: int
    nbytes: int
    files: int
    reused: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's type (torch's name without the prefix) and full shape."""

    dtype: str
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """A checkpoint's tensors under Hugging Face's names. Threads may share it.

    Attributes:
        tensors: everything there is.
        groups: the same names, those together that are read together.
    """

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    @property
    def groups(self) -> list[list[str]]: ...

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Values of the named tensors.

        Raises:
            CheckpointError: damaged.
        """


class Converter(Protocol):
    """Converts between Hugging Face's format and a backend's own, from disk to disk.

    Errors: ``CheckpointError`` lists the tensors. The output appears whole or not at all; what an interrupted
    conversion has finished is kept beside it and used by the next one of the same kind.
    """

    def prove(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        """Prove on shapes alone that every element of the model's tensors has one place under the run's layout.

        Needs ``config.json`` of ``config.model.path`` alone.

        Returns:
            Shape of every tensor that a Hugging Face directory of the model must hold.

        Raises:
            CheckpointError: tensors of which some element has no place, or two.
        """

    def to_checkpoint(
        self, config: RunConfig, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        """``config.model.path`` to a checkpoint of this backend, laid out as ``config.trainer.parallel``."""

    def to_hugging_face(
        self, config: RunConfig, checkpoint: Path, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        """A checkpoint of this backend, under any layout, to a Hugging Face directory.

        Args:
            checkpoint: what ``TrainerBackend.save`` or ``to_checkpoint`` wrote; ``config.model.path`` gives dimensions,
                configuration and tokenizer.
        """

    def open_checkpoint(self, config: RunConfig, checkpoint: Path) -> TensorSource:
        """A checkpoint of this backend to compare with another one."""

    def open_hugging_face(self, directory: Path) -> TensorSource:
        """A Hugging Face directory of any family, to compare with another one."""
