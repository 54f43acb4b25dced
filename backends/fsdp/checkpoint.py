"""Training state on disk in torch's distributed format, readable on any number of ranks, and its conversion."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import load as load_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from backends.common.checkpoint.integrity import Checksums, VerifyingReader, damage_error
from backends.common.checkpoint.reading import FORMAT, UNREADABLE, brief, cause_of, require_format
from backends.common.checkpoint.writing import RankWriting, translate_disk_errors, write_data_file
from backends.common.hugging_face.converter import HuggingFaceConverter
from backends.common.hugging_face.files import Shape
from backends.common.process.agreement import list_names, together
from backends.common.trainer.host_memory import HostCopies
from backends.fsdp.model import FsdpModel, meta_model
from backends.fsdp.names import TensorRows, pieces
from backends.fsdp.optimizer import FsdpOptimizer
from backends.fsdp.parallel import FsdpGroups
from backends.fsdp.weights import checkpoint_shapes
from slime_like.errors import CheckpointError, ConfigError
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorInfo, TensorSource

MODEL, MOMENTS, RANDOM = "model.", "optimizer.", "random."
"""Prefixes of the stored tensors' names."""

_COMMON = "common.json"
PLAIN_FILES = (".metadata", _COMMON)
"""Files written next to the data files. Every rank reads them whole."""


class StoredCheckpoint:
    """A checkpoint opened for reading, with its small files verified against their checksums.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.checksums = Checksums.read(directory)
        self.checksums.verify_plain_files(PLAIN_FILES)
        try:
            self.common = json.loads((directory / _COMMON).read_text(encoding="utf-8"))
            metadata = VerifyingReader(directory, self.checksums).read_metadata().state_dict_metadata
        except UNREADABLE as error:
            raise damage_error(directory, f"{type(error).__name__}: {error}") from error
        if not isinstance(self.common, dict):
            raise damage_error(directory, f"{_COMMON} is not a JSON object")
        require_format(directory, self.common)
        tensors = {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
        for name, entry in tensors.items():
            elements, stored = math.prod(entry.size), sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored != elements:  # torch's reader would leave the rest of the memory unchanged
                raise damage_error(directory, f"{name}: {stored} of {elements} elements are stored")
        self.shapes: dict[str, Shape] = {name: tuple(entry.size) for name, entry in tensors.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in tensors.items()}

    def require(self, state: dict[str, Tensor], kinds: set[str] | None = None) -> None:
        """Reject a checkpoint unless its tensors are exactly ``state``'s, among the given ``kinds`` (None: model and
        optimizer).
        """
        prefixes = tuple(kinds or (MODEL, MOMENTS))
        found = {name: shape for name, shape in self.shapes.items() if name.startswith(prefixes)}
        wanted = {name: tuple(value.shape) for name, value in state.items()}
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if differing:
            raise CheckpointError(
                f"belongs to another model; names or shapes differ: {list_names(differing)}",
                code="checkpoint-of-another-model",
                who=str(self._directory),
                remedy="use the model.path that wrote it",
            )

    def read(self, state: dict[str, Tensor], alone: bool = False) -> None:
        """Fill the tensors of ``state``. Collective over the world, unless ``alone``.

        Raises:
            CheckpointError: a piece differs from what was written; raised on every rank.
        """
        reader = VerifyingReader(self._directory, self.checksums)
        try:
            load_state(state, storage_reader=reader, no_dist=alone)
        except (CheckpointException, *UNREADABLE) as error:
            raise damage_error(self._directory, brief(cause_of(error))) from error


class FsdpCheckpointWriter(RankWriting):
    """A checkpoint being written: planned on creation, then written, then finished.

    Args:
        state: tensors by name; sharded tensors are written once, each rank its part.
        common: plain values, the same on every rank.
        copies: memory for an immediate copy of every tensor, so that the state may change before it is written.
    """

    plain_files = PLAIN_FILES

    def __init__(
        self,
        directory: Path,
        state: dict[str, Tensor],
        common: dict[str, Any],
        device: torch.device,
        copies: HostCopies | None = None,
    ) -> None:
        super().__init__(directory, device)
        self._common = common
        self._results: list[WriteResult] = []
        self._metadata: Metadata | None = None
        planner, plan = self._plan(state)
        self._entries = [(item, planner.resolve_data(item)) for item in plan.items]
        if copies is not None:
            made = iter(copies.of(data for _, data in self._entries if isinstance(data, Tensor)))
            self._entries = [(item, next(made) if isinstance(data, Tensor) else data) for item, data in self._entries]

    def _plan(self, state: dict[str, Tensor]) -> tuple[DefaultSavePlanner, SavePlan]:
        """Plan this rank's files. Rank 0 merges all plans and keeps the index."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
        plans = _gathered(planner.create_local_plan())
        settled: list[SavePlan] | None = None
        if plans is not None:
            settled, self._metadata = planner.create_global_plan(plans)
        own: list[Any] = [None]
        dist.scatter_object_list(own, settled)
        return planner, planner.finish_plan(own[0])

    def _write(self) -> None:
        if not self._entries:
            return
        name = f"__{dist.get_rank()}_0.distcp"
        with translate_disk_errors(self._directory / name):
            self._pieces[name], self._results = write_data_file(self._directory / name, name, self._entries)
        self._entries = []

    def _write_index(self) -> None:
        results = _gathered(self._results)
        together(lambda: self._write_plain_files(results), f"writing {self._directory}", self._device)

    def _write_plain_files(self, results: list[list[WriteResult]] | None) -> None:
        if results is None or self._metadata is None:
            return
        with translate_disk_errors(self._directory):
            FileSystemWriter(self._directory).finish(self._metadata, results)
            with (self._directory / _COMMON).open("w", encoding="utf-8") as file:
                json.dump(self._common, file, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())


def _gathered(value: Any) -> list[Any] | None:
    """Return every rank's ``value`` on rank 0, and ``None`` on the others. Only listed classes are read."""
    everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, everyones)
    return everyones


# ------------------------------------------------------------------------------------------------------------ the state
def model_state(model: FsdpModel) -> dict[str, Tensor]:
    return {MODEL + name: tensor.detach() for name, tensor in model.stored_by_name().items()}


def training_state(model: FsdpModel, optimizer: FsdpOptimizer) -> dict[str, Tensor]:
    """Return the tensors of model and optimizer, not copies, as sharded ones. Saving reads and loading fills them."""
    state, parameters = model_state(model), model.parameters_by_name()
    for name, moments in optimizer.moments.items():
        for kind, value in moments.items():
            state[f"{MOMENTS}{kind}.{name}"] = _like(parameters[name], value)
    rank = dist.get_rank()
    state[f"{RANDOM}{rank}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state[f"{RANDOM}{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def _like(parameter: nn.Parameter | Tensor, local: Tensor) -> Tensor:
    """Wrap ``local`` as this rank's rows of a tensor sharded like ``parameter``."""
    assert isinstance(parameter, DTensor)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def set_random_state(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        if name.startswith(RANDOM):
            (torch.cuda.set_rng_state if name.endswith(".cuda") else torch.set_rng_state)(value)


def plain_values(groups: FsdpGroups) -> dict[str, Any]:
    """Return the plain values written next to the model's tensors."""
    return {"backend": "fsdp", "format": FORMAT, "layout": layout(groups)}


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
        self._checkpoint = StoredCheckpoint(checkpoint)
        self._checkpoint.checksums.verify_lengths()
        self._parameters: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.groups: list[list[str]] = []
        for stored, shape in self._checkpoint.shapes.items():
            if stored.startswith(MODEL):
                parts = cut(stored.removeprefix(MODEL), torch.empty(shape, device="meta"))
                shapes = {piece.name: tuple(piece.view.shape) for piece in parts}
                dtype = str(self._checkpoint.dtypes[stored]).removeprefix("torch.")
                self.tensors |= {name: TensorInfo(dtype, shape) for name, shape in shapes.items()}
                self.groups.append(list(shapes))
                self._parameters[next(iter(shapes))] = stored

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read tensors. ``names`` must be one of ``groups``."""
        stored = self._parameters[names[0]]
        values = torch.empty(self._checkpoint.shapes[stored], dtype=self._checkpoint.dtypes[stored])
        self._checkpoint.read({stored: values}, alone=True)
        return {piece.name: piece.view for piece in self._cut(stored.removeprefix(MODEL), values)}
