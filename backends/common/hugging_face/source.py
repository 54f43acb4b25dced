"""A Hugging Face directory's tensors, to be compared."""

from pathlib import Path

from torch import Tensor

from backends.common.hugging_face.conversion import DTYPES
from backends.common.hugging_face.files import HfCheckpoint
from slime_like.interfaces.conversion import TensorInfo


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
