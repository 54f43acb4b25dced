"""The part of ``slime-like convert`` that is the same for every backend."""

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor

from backends.common.hugging_face.conversion import DTYPES
from backends.common.hugging_face.files import HfCheckpoint
from backends.common.hugging_face.writing import to_hugging_face
from slime_like.config import RunConfig
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorInfo, TensorSource


class HuggingFaceConverter(ABC):
    """See ``slime_like.interfaces.conversion.Converter``."""

    @abstractmethod
    def open_checkpoint(self, config: RunConfig, checkpoint: Path) -> TensorSource: ...

    def open_hugging_face(self, directory: Path) -> TensorSource:
        return HuggingFaceSource(directory)

    def to_hugging_face(
        self, config: RunConfig, checkpoint: Path, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        source = self.open_checkpoint(config, checkpoint)
        return to_hugging_face(config, source, checkpoint, output, options, report)


class HuggingFaceSource:
    """The safetensors files of a directory, whatever the model is."""

    def __init__(self, directory: Path) -> None:
        self._checkpoint = HfCheckpoint(directory)
        self.tensors = {
            name: TensorInfo(_torch_name(self._checkpoint.dtype(name)), shape)
            for name, shape in self._checkpoint.shapes().items()
        }

    @property
    def groups(self) -> list[list[str]]:
        return [[name] for name in sorted(self.tensors)]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._checkpoint.read_whole(name) for name in names}


def _torch_name(name: str) -> str:
    return str(DTYPES[name]).removeprefix("torch.") if name in DTYPES else name
