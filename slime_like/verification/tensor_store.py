"""Tensors by name on disk, one at a time in memory: a model that others are compared with."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class TensorStore:
    """Written bucket by bucket, read tensor by tensor."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._files: dict[str, Path] = {}
        self._count = 0

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        file = self._directory / f"{self._count:06d}.safetensors"
        self._count += 1
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        self._files |= dict.fromkeys(tensors, file)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
