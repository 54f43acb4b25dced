"""One rank's shard of Hugging Face's model and the optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from backends.common.checkpoint.stored import StoredTensors, require_schedule
from backends.common.checkpoint.writing import CheckpointWriter, Part
from backends.common.hugging_face.directory import SHARD_BYTES, write_hf_directory
from backends.common.hugging_face.files import Shape
from backends.common.process.agreement import together
from backends.common.trainer.host_memory import HostCopies
from backends.common.trainer.lora import Initial
from backends.common.trainer.state import TrainerState
from backends.fsdp import checkpoint
from backends.fsdp.model import FsdpModel, computes_alike
from backends.fsdp.optimizer import FsdpOptimizer
from backends.fsdp.parallel import FsdpGroups, shard_of
from backends.fsdp.weights import export_buckets, export_manifest, fill, load_hf_weights, piece_shapes
from slime_like.config import RunConfig
from slime_like.interfaces import WeightBucket, WeightExport
from slime_like.interfaces.weights import MODEL
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.adapter import ADAPTER


class FsdpState(TrainerState):
    """See ``TrainerState``."""

    optimizer: FsdpOptimizer

    def __init__(self, config: RunConfig, model: FsdpModel, groups: FsdpGroups, device: torch.device) -> None:
        super().__init__()
        self._config = config
        self._groups = groups
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._lives_on_host = config.trainer.optimizer.offload
        self.model = model

    def weights(self) -> list[Tensor]:
        return _local(self.model.parameters_by_name() | self.model.kept_by_name())

    def lora_weights(self) -> list[Tensor]:
        return _local(self.model.stored_by_name()) if self.model.lora_weights else []

    def fill_lora_weights(self, source: Callable[[dict[str, Shape]], Initial]) -> None:
        factors = self.model.stored_by_name()
        fill(self.model, factors, source(piece_shapes(self.model, factors)))

    def is_same_model(self, path: Path) -> bool:
        ours, theirs = (ModelDimensions.from_checkpoint(model) for model in (self._config.model.path, path))
        return ours == theirs and computes_alike(path, self._config.model)

    def load_hugging_face(self, path: Path) -> None:
        load_hf_weights(self.model, path, self._device, self._config.model.lora.path)

    def load_weights(self, directory: Path) -> None:
        self._read(self._open(directory), checkpoint.model_parts(self.model), (checkpoint.MOMENTS, checkpoint.RANDOM))

    def save_weights(self, directory: Path) -> None:
        self.model.shard_weights()
        parts = checkpoint.model_parts(self.model)
        checkpoint.plan_save(directory, parts, self._groups, self._device).write_all()

    def load(self, directory: Path) -> None:
        """Restore everything bit for bit on the ranks that wrote it, including random state.

        On other ranks, restore everything but random states, which belong to the old ranks.
        """
        stored = self._open(directory)
        common, now = stored.common, self._config.schedule
        if "schedule" not in self._config.checkpoint.override:
            require_schedule(directory, common["schedule"], now, sorted(common["schedule"].keys() | now.keys()))
        parts = checkpoint.training_parts(self.model, self.optimizer)
        is_same = common["layout"] == checkpoint.layout(self._groups)
        random = checkpoint.random_parts() if is_same else []
        self._read(stored, parts, (checkpoint.RANDOM,), random)
        self.optimizer.set_updates(int(common["updates"]))
        checkpoint.set_random_states(random)

    def _open(self, directory: Path) -> StoredTensors:
        return together(lambda: checkpoint.open_stored(directory), f"reading {directory}", self._device)

    def _read(
        self, stored: StoredTensors, parts: list[Part], ignored: tuple[str, ...], random: Sequence[Part] = ()
    ) -> None:
        what = f"reading {stored.directory}"
        wanted = {part.name: (part.shape, False) for part in parts}
        together(lambda: stored.require(wanted, ignored), what, self._device)
        self.model.shard_weights()
        together(lambda: stored.read([*parts, *random]), what, self._device)

    def plan_save(self, directory: Path, copies: HostCopies | None = None) -> CheckpointWriter:
        self.model.shard_weights()
        parts = checkpoint.training_parts(self.model, self.optimizer)
        common = {"schedule": self._config.schedule, "updates": self.optimizer.updates}
        return checkpoint.plan_save(directory, parts, self._groups, self._device, common, copies)

    def export_weights(self, bucket_bytes: int) -> WeightExport:
        is_adapter = bool(self.model.lora_weights) and self._config.model.lora.sync == ADAPTER
        return self._export(bucket_bytes, ADAPTER if is_adapter else MODEL)

    def _exported(self, updates: str) -> dict[str, Tensor]:
        every = self.model.own_by_name() | self.model.kept_by_name()
        return self.model.stored_by_name() if updates == ADAPTER else every

    def _export(self, bucket_bytes: int, updates: str) -> WeightExport:
        """Export the whole model, or only the factors by PEFT's names."""
        tensors, kept, factors = self._exported(updates), self.model.kept_by_name(), self.model.lora_weights

        def rows(name: str) -> Tensor:
            shard = shard_of(tensors[name]).detach()
            return factors[name].merge(shard.to(self._device)) if name in factors else shard

        buckets = export_buckets(tensors, rows, self.model.pieces, self._dtype, bucket_bytes, self._device)
        return WeightExport(export_manifest(piece_shapes(self.model, tensors), kept, self._dtype, updates), buckets)

    def export_gradients(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        model, rows = self.model, self.optimizer.gradients().__getitem__
        trained = model.stored_by_name() if model.lora_weights else model.own_by_name()
        return export_buckets(trained, rows, model.pieces, torch.float32, bucket_bytes, self._device)

    def export_hugging_face(self, directory: Path) -> None:
        model, adapter = self._config.model, self._config.model.lora if self.model.lora_weights else None
        updates = MODEL if adapter is None else ADAPTER
        buckets, names = self._export(SHARD_BYTES, updates), piece_shapes(self.model, self._exported(updates))
        write_hf_directory(buckets, names, model.path, directory, 0, self._dtype, self._device, adapter)

    def offload_to_host(self, keep_weights: bool) -> None:
        self.model.shard_weights()
        self.optimizer.zero_gradients()
        if self._lives_on_host:
            return
        self.offloaded.offload(moment for kinds in self.optimizer.moments.values() for moment in kinds.values())
        if not keep_weights:
            self.offloaded.offload(self.weights())


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return this rank's part of every tensor, as the model's memory."""
    return [shard_of(each).detach() if isinstance(each, DTensor) else each for each in tensors.values()]
