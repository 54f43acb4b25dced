"""Training state on disk through torch's distributed checkpointing: readable on as many ranks and on others."""

import json
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load as load_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from backends.common.checkpoint.integrity import Checksums, VerifyingReader, damaged
from backends.common.checkpoint.reading import FORMAT, UNREADABLE, brief, cause_of, require_format
from backends.common.hugging_face.files import Shape
from backends.common.process.agreement import listed
from backends.fsdp.checkpoint_writer import COMMON, PLAIN_FILES
from backends.fsdp.model import LogprobModel
from backends.fsdp.optimizer import Optimizer
from backends.fsdp.parallel import Groups
from slime_like.checks.schedule import total_updates
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError

MODEL, MOMENTS, RANDOM = "model.", "optimizer.", "random."
"""What the names of the stored tensors begin with."""


class StoredCheckpoint:
    """A checkpoint opened for reading."""

    def __init__(self, directory: Path, checksums: Checksums, common: dict[str, Any], metadata: Metadata) -> None:
        self._directory = directory
        self._checksums = checksums
        self.common = common
        tensors = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.shapes: dict[str, Shape] = {name: tuple(entry.size) for name, entry in tensors.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in tensors.items()}

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read the small files, after comparing them with their checksums.

        Raises:
            CheckpointError: no whole checkpoint, or damaged.
        """
        checksums = Checksums.read(directory)
        checksums.verify_plain_files(PLAIN_FILES)
        try:
            common = json.loads((directory / COMMON).read_text(encoding="utf-8"))
            metadata = VerifyingReader(directory, checksums).read_metadata()
        except UNREADABLE as error:
            raise damaged(directory, f"{type(error).__name__}: {error}") from error
        require_format(directory, common)
        return cls(directory, checksums, common, metadata)

    def require_whole(self) -> None:
        """Refuse data files that are missing or of another length, whatever is read of them."""
        self._checksums.verify_lengths()

    def require(self, state: dict[str, Tensor], kinds: set[str] | None = None) -> None:
        """Refuse a checkpoint that has not exactly the tensors of ``state``, of the given ``kinds`` (none: model and
        optimizer).
        """
        prefixes = tuple(kinds or (MODEL, MOMENTS))
        found = {name: shape for name, shape in self.shapes.items() if name.startswith(prefixes)}
        wanted = {name: tuple(value.shape) for name, value in state.items()}
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if differing:
            raise CheckpointError(
                f"is of another model; names or shapes differ: {listed(differing)}",
                code="checkpoint-of-another-model",
                who=str(self._directory),
                remedy="use the model.path that wrote it",
            )

    def read(self, state: dict[str, Tensor], alone: bool = False) -> None:
        """Fill the tensors of ``state``. Collective over the world, unless read ``alone``.

        Raises:
            CheckpointError: a piece is not as it was written; on every rank.
        """
        reader = VerifyingReader(self._directory, self._checksums)
        try:
            load_state(state, storage_reader=reader, no_dist=alone)
        except (CheckpointException, *UNREADABLE) as error:
            raise damaged(self._directory, brief(cause_of(error))) from error


# ----------------------------------------------------------------------------------------------------------- the state
def model_state(model: LogprobModel) -> dict[str, Tensor]:
    tensors = model.parameters_by_name() | model.kept_by_name()
    return {MODEL + name: tensor.detach() for name, tensor in tensors.items()}


def training_state(model: LogprobModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """The very tensors of model and optimizer, as sharded ones: writing reads them, loading fills them."""
    state, parameters = model_state(model), model.parameters_by_name()
    for name, moments in optimizer.moments.items():
        for kind, value in moments.items():
            state[f"{MOMENTS}{kind}.{name}"] = _like(parameters[name], value)
    return state | _random_state()


def _like(parameter: nn.Parameter | Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's rows of a tensor that is sharded like ``parameter``."""
    assert isinstance(parameter, DTensor)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _random_state() -> dict[str, Tensor]:
    rank = dist.get_rank()
    state = {f"{RANDOM}{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"{RANDOM}{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        if name.startswith(RANDOM):
            (torch.cuda.set_rng_state if name.endswith(".cuda") else torch.set_rng_state)(value)


def plain_values(groups: Groups) -> dict[str, Any]:
    """What is written beside the model's tensors."""
    return {"backend": "fsdp", "format": FORMAT, "layout": layout(groups)}


def layout(groups: Groups) -> dict[str, int]:
    return {"context": groups.context.size(), "data": groups.replicas.size()}


def schedule(config: RunConfig) -> dict[str, Any]:
    """Settings that the learning rate and the weight decay of every update follow from."""
    settings = config.trainer.optimizer
    found = {name: getattr(settings, name) for name in ("lr", "min_lr", "warmup_steps", "decay", "weight_decay")}
    grows = settings.final_weight_decay is not None
    if grows:
        found["final_weight_decay"] = settings.final_weight_decay
    if settings.decay != "constant" or grows:  # what is constant does not depend on where the run ends: it may go on
        found["updates"] = total_updates(config)
    return found
