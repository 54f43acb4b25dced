"""Checkpoints of both formats as tensors under Hugging Face's names, to be compared."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from backends.megatron.conversion.hf_files import HfCheckpoint
from backends.megatron.conversion.offline.megatron_files import MegatronCheckpoint
from backends.megatron.conversion.offline.request import DTYPES
from backends.megatron.conversion.offline.to_hugging_face import hugging_face_tensors, whole_parameters
from slime_like.config import RunConfig
from slime_like.config.dimensions import ModelDimensions
from slime_like.conversion import TensorInfo


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


class MegatronSource:
    """A Megatron checkpoint; tensors that make up one parameter are read together."""

    def __init__(self, config: RunConfig, checkpoint: Path) -> None:
        plans = whole_parameters(config, ModelDimensions.from_checkpoint(config.model.path))
        self._checkpoint = MegatronCheckpoint(checkpoint, plans)
        self._plans = {plan.placement.source_names()[0]: plan for plan in plans}
        self.tensors = {
            name: TensorInfo(str(self._checkpoint.dtype(plan)).removeprefix("torch."), shape)
            for plan in plans
            for name, shape in zip(plan.placement.source_names(), plan.placement.shapes, strict=True)
        }

    @property
    def groups(self) -> list[list[str]]:
        return [plan.placement.source_names() for plan in self._plans.values()]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Names must be one of ``groups``."""
        plan = self._plans[names[0]]
        return hugging_face_tensors(plan, self._checkpoint.read(plan))


def _torch_name(name: str) -> str:
    return str(DTYPES[name]).removeprefix("torch.") if name in DTYPES else name
