"""Training state on disk in torch's distributed format, readable on any number of ranks, and its conversion."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from backends.common.checkpoint.stored import FORMAT, StoredTensors
from backends.common.checkpoint.writing import CheckpointWriter, Part
from backends.common.hugging_face.converter import HuggingFaceConverter
from backends.common.trainer.host_memory import HostCopies
from backends.fsdp.model import FsdpModel, meta_model
from backends.fsdp.names import TensorRows, pieces
from backends.fsdp.optimizer import FsdpOptimizer
from backends.fsdp.parallel import FsdpGroups, rows_of_rank, shard_of
from backends.fsdp.weights import checkpoint_shapes
from slime_like.errors import ConfigError
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorInfo, TensorSource

MODEL, MOMENTS, RANDOM = "model.", "optimizer.", "random."
"""Prefixes of the stored tensors' names."""

COMMON = "common.json"
"""Name of the file with plain values."""


def open_stored(directory: Path) -> StoredTensors:
    """Open a checkpoint. Raises ``CheckpointError`` if it is damaged."""

    def read_common(directory: Path) -> Any:
        return json.loads((directory / COMMON).read_text(encoding="utf-8"))

    return StoredTensors(directory, [COMMON], read_common)


def plan_save(
    directory: Path,
    parts: list[Part],
    groups: FsdpGroups,
    device: torch.device,
    common: Mapping[str, Any] | None = None,
    copies: HostCopies | None = None,
) -> CheckpointWriter:
    """Return a writer of ``parts``, and of the plain values ``common``; see ``CheckpointWriter``."""
    values = {"backend": "fsdp", "format": FORMAT, "layout": layout(groups), **(common or {})}
    text = json.dumps(values, sort_keys=True)
    first = dist.get_rank() == 0  # which writes what every rank holds whole
    mine = [part for part in parts if part.data.numel() and (first or part.shape != part.data.shape)]
    mine += [] if common is None else random_parts()
    return CheckpointWriter(directory, mine, {}, {COMMON: text.encode()}, device, copies.of if copies else None)


# ------------------------------------------------------------------------------------------------------------ the state
def model_parts(model: FsdpModel) -> list[Part]:
    return [_part(MODEL + name, tensor, tensor) for name, tensor in model.stored_by_name().items()]


def training_parts(model: FsdpModel, optimizer: FsdpOptimizer) -> list[Part]:
    """Describe the tensors of model and optimizer: this rank's rows, or a whole tensor if all ranks hold it."""
    parameters = model.parameters_by_name()
    moments = [
        _part(f"{MOMENTS}{kind}.{name}", parameters[name], value)
        for name, kinds in optimizer.moments.items()
        for kind, value in kinds.items()
    ]
    return [*model_parts(model), *moments]


def random_parts() -> list[Part]:
    """Describe copies of the states of this rank's generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return [_part(f"{RANDOM}{dist.get_rank()}.{kind}", state, state) for kind, state in states.items()]


def set_random_states(parts: list[Part]) -> None:
    for part in parts:
        (torch.cuda.set_rng_state if part.name.endswith(".cuda") else torch.set_rng_state)(part.data)


def _part(name: str, like: Tensor, held: Tensor) -> Part:
    """Describe ``held``, this rank's part of a tensor that is sharded like ``like``, or whole."""
    first = rows_of_rank(like).start if isinstance(like, DTensor) else 0
    data = shard_of(held) if isinstance(held, DTensor) else held
    return Part(name, data.detach(), tuple(like.shape), (first, *[0] * (like.ndim - 1)))


def layout(groups: FsdpGroups) -> dict[str, int]:
    return {"context": groups.context.size(), "data": groups.replicas.size()}


# ----------------------------------------------------------------------------------------------------------- conversion
class FsdpConverter(HuggingFaceConverter):
    """Converter of ``slime-like convert``; see ``slime_like.interfaces.conversion.Converter``."""

    def prove(self) -> dict[str, tuple[int, ...]]:
        """Return the model's parameters as the tensors: nothing is split or rearranged."""
        return checkpoint_shapes(meta_model(self.model, torch.float32))

    def to_checkpoint(self, output: Path, options: ConversionOptions, report: Report) -> ConversionSummary:
        """Raise ConfigError: there is nothing to convert to."""
        raise ConfigError(
            "trainer.backend=fsdp reads Hugging Face checkpoints directly; give the directory as model.path"
        )

    def _open(self, checkpoint: Path) -> TensorSource:
        return FsdpSource(
            checkpoint, meta_model(self.model, torch.float32).pieces if self.model.lora.is_set else pieces
        )


class FsdpSource:
    """A training checkpoint of this backend. Tensors of one parameter are read together.

    Weights are stored as float32, whatever type they were computed with. ``cut`` divides a parameter into tensors.
    """

    def __init__(self, checkpoint: Path, cut: Callable[[str, Tensor], list[TensorRows]]) -> None:
        self._cut = cut
        self._stored = open_stored(checkpoint)
        self._parameters: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.groups: list[list[str]] = []
        for stored, tensor in self._stored.tensors.items():
            if stored.startswith(MODEL):
                parts = cut(stored.removeprefix(MODEL), torch.empty(tensor.size, device="meta"))
                shapes = {piece.name: tuple(piece.view.shape) for piece in parts}
                dtype = str(tensor.properties.dtype).removeprefix("torch.")
                self.tensors |= {name: TensorInfo(dtype, shape) for name, shape in shapes.items()}
                self.groups.append(list(shapes))
                self._parameters[next(iter(shapes))] = stored

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read tensors. ``names`` must be one of ``groups``."""
        stored = self._parameters[names[0]]
        values = torch.empty(self._stored.tensors[stored].size, dtype=self._stored.dtype(stored))
        self._stored.read([_part(stored, values, values)])
        return {piece.name: piece.view for piece in self._cut(stored.removeprefix(MODEL), values)}
