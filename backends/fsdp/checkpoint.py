"""Training state on disk through torch's distributed checkpointing: readable on as many ranks and on others."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load as load_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from backends.common.checkpoint.integrity import Checksums, VerifyingReader, damaged
from backends.common.hugging_face.files import Shape
from backends.common.process.agreement import listed, together
from backends.fsdp.checkpoint_writer import COMMON, PLAIN_FILES, CheckpointWriter
from backends.fsdp.model import LogprobModel
from backends.fsdp.optimizer import Optimizer
from backends.fsdp.parallel import Groups
from slime_like.checks.schedule import total_updates
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError

FORMAT = 1
MODEL, MOMENTS, RANDOM = "model.", "optimizer.", "random."
"""What the names of the stored tensors begin with."""
_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, LookupError, AttributeError, UnpicklingError)
"""What torch, pickle and JSON raise on a file that is missing, cut off or overwritten."""


def plan_checkpoint(
    directory: Path,
    config: RunConfig,
    model: LogprobModel,
    optimizer: Optimizer,
    groups: Groups,
    device: torch.device,
    snapshot: bool,
) -> CheckpointWriter:
    """A writer of model, optimizer, schedule and random state into ``directory``. Collective over the world.

    The caller owns naming and atomicity; all ranks must share the file system.

    Args:
        snapshot: of the state as it is now, in host memory: it may change before it is written.

    Raises:
        CheckpointError: the disk refused; on every rank, even if only one could not write.
    """
    model.shard_weights()
    state, common = _training_state(model, optimizer), _common(config, optimizer, groups)
    return CheckpointWriter(Path(directory), state, common, device, snapshot)


def load_checkpoint(
    directory: Path,
    config: RunConfig,
    model: LogprobModel,
    optimizer: Optimizer,
    groups: Groups,
    device: torch.device,
) -> None:
    """Read what a writer of ``plan_checkpoint`` wrote, in place. Collective over the world.

    On the ranks that wrote it everything comes back bit for bit, random state included. On other ranks weights,
    optimizer and schedule do; random states belong to the old ranks and stay as they are.

    Raises:
        CheckpointError: no checkpoint there, damaged, of another model, or with another learning-rate schedule.
    """
    directory = Path(directory)
    opened = together(lambda: StoredCheckpoint.open(directory), f"reading {directory}", device)
    common = opened.common
    _require_schedule(directory, common["schedule"], _schedule(config))
    state = _training_state(model, optimizer)
    if common["layout"] != _layout(groups):
        state = {name: value for name, value in state.items() if not name.startswith(RANDOM)}
    opened.require({name: value for name, value in state.items() if not name.startswith(RANDOM)})
    model.shard_weights()
    opened.read(state)
    optimizer.set_updates(int(common["updates"]))
    _set_random_state(state)


def save_weights(directory: Path, model: LogprobModel, groups: Groups, device: torch.device) -> None:
    """Write what ``load_weights`` reads. Collective over the world.

    Raises:
        CheckpointError: the disk refused.
    """
    model.shard_weights()
    common = {"backend": "fsdp", "format": FORMAT, "layout": _layout(groups)}
    CheckpointWriter(Path(directory), _model_state(model), common, device).write_all()


def load_weights(directory: Path, model: LogprobModel, device: torch.device) -> None:
    """Read the model's weights alone, in place, on any number of ranks. Collective over the world.

    Raises:
        CheckpointError: no checkpoint there, damaged, or of another model.
    """
    directory = Path(directory)
    opened = together(lambda: StoredCheckpoint.open(directory), f"reading {directory}", device)
    state = _model_state(model)
    opened.require(state, {MODEL})
    model.shard_weights()
    opened.read(state)


class StoredCheckpoint:
    """A checkpoint opened for reading.

    Attributes:
        common: its plain values.
        shapes, dtypes: of every stored tensor, by its name in the checkpoint.
    """

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
    def open(cls, directory: Path) -> StoredCheckpoint:
        """Read the small files, after comparing them with their checksums.

        Raises:
            CheckpointError: no whole checkpoint, or damaged.
        """
        checksums = Checksums.read(directory)
        checksums.verify_plain_files(PLAIN_FILES)
        try:
            common = json.loads((directory / COMMON).read_text(encoding="utf-8"))
            metadata = VerifyingReader(directory, checksums).read_metadata()
        except _UNREADABLE as error:
            raise damaged(directory, f"{type(error).__name__}: {error}") from error
        if common.get("format") != FORMAT:
            raise CheckpointError(
                f"{directory}: has checkpoint format {common.get('format')}, this version reads {FORMAT}; "
                "load it with the version that wrote it and export a Hugging Face model"
            )
        return cls(directory, checksums, common, metadata)

    def require_whole(self) -> None:
        """Refuse data files that are missing or of another length, whatever is read of them.

        Raises:
            CheckpointError: names the file.
        """
        self._checksums.verify_lengths()

    def require(self, state: dict[str, Tensor], kinds: set[str] | None = None) -> None:
        """Refuse a checkpoint that has not exactly the tensors of ``state``, of the given ``kinds`` (none: model and
        optimizer).

        Raises:
            CheckpointError: names or shapes differ.
        """
        prefixes = tuple(kinds or (MODEL, MOMENTS))
        found = {name: shape for name, shape in self.shapes.items() if name.startswith(prefixes)}
        wanted = {name: tuple(value.shape) for name, value in state.items()}
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if differing:
            raise CheckpointError(
                f"{self._directory}: is of another model; names or shapes differ: {listed(differing)}; use the "
                "model.path that wrote it"
            )

    def read(self, state: dict[str, Tensor], alone: bool = False) -> None:
        """Fill the tensors of ``state``. Collective over the world, unless read ``alone``.

        Raises:
            CheckpointError: a piece is not as it was written; on every rank.
        """
        reader = VerifyingReader(self._directory, self._checksums)
        try:
            load_state(state, storage_reader=reader, no_dist=alone)
        except (CheckpointException, *_UNREADABLE) as error:
            # torch wraps what a rank met.
            reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            if isinstance(reason, CheckpointError):
                raise reason from error
            text = " ".join(str(reason).split()).partition(". ")[0]
            raise damaged(self._directory, f"{type(reason).__name__}: {text}") from error


# ----------------------------------------------------------------------------------------------------------- the state
def _model_state(model: LogprobModel) -> dict[str, Tensor]:
    tensors = model.parameters_by_name() | model.kept_by_name()
    return {MODEL + name: tensor.detach() for name, tensor in tensors.items()}


def _training_state(model: LogprobModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """The very tensors of model and optimizer, as sharded ones: writing reads them, loading fills them."""
    state, parameters = _model_state(model), model.parameters_by_name()
    for name, moments in optimizer.moments.items():
        for kind, value in moments.items():
            state[f"{MOMENTS}{kind}.{name}"] = _like(parameters[name], value)
    return state | _random_state()


def _like(parameter: nn.Parameter | Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's rows of a tensor that is sharded like ``parameter``."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _random_state() -> dict[str, Tensor]:
    rank = dist.get_rank()
    state = {f"{RANDOM}{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"{RANDOM}{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        if name.startswith(RANDOM):
            (torch.cuda.set_rng_state if name.endswith(".cuda") else torch.set_rng_state)(value)


def _common(config: RunConfig, optimizer: Optimizer, groups: Groups) -> dict[str, Any]:
    return {
        "backend": "fsdp",
        "format": FORMAT,
        "layout": _layout(groups),
        "schedule": _schedule(config),
        "updates": optimizer.updates,
    }


def _layout(groups: Groups) -> dict[str, int]:
    return {"context": groups.context.size(), "data": groups.replicas.size()}


def _schedule(config: RunConfig) -> dict[str, Any]:
    settings = config.trainer.optimizer
    schedule: dict[str, Any] = {
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "warmup_steps": settings.warmup_steps,
        "decay": settings.decay,
        "weight_decay": settings.weight_decay,
    }
    grows = settings.final_weight_decay is not None
    if grows:
        schedule["final_weight_decay"] = settings.final_weight_decay
    if settings.decay != "constant" or grows:  # what is constant does not depend on where the run ends: it may go on
        schedule["updates"] = total_updates(config)
    return schedule


def _require_schedule(directory: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    keys = sorted(saved.keys() | now.keys())
    differing = [f"{key} {saved.get(key)} (now {now.get(key)})" for key in keys if saved.get(key) != now.get(key)]
    if differing:
        raise CheckpointError(
            f"{directory}: was trained with another learning-rate schedule: {', '.join(differing)}; "
            "use the same steps and trainer.optimizer settings"
        )
