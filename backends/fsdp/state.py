"""One rank's shard of Hugging Face's model and the optimizer."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from backends.common.hugging_face.directory import SHARD_BYTES, write_hf_directory
from backends.common.trainer.state import TrainerState
from backends.fsdp import checkpoint, offload
from backends.fsdp.checkpoint_writer import CheckpointWriter
from backends.fsdp.model import LogprobModel, computes_alike
from backends.fsdp.optimizer import Optimizer
from backends.fsdp.parallel import Groups
from backends.fsdp.weights import checkpoint_shapes, export_buckets, load_hf_weights, own_tensors
from slime_like.config import RunConfig
from slime_like.interfaces import WeightBucket
from slime_like.models.dimensions import ModelDimensions


class FsdpState(TrainerState):
    """See ``TrainerState``.

    Attributes:
        model: Hugging Face's model with a logprob head, sharded.
        optimizer: AdamW on this rank's shards, in a trainer that trains.
    """

    optimizer: Optimizer

    def __init__(self, config: RunConfig, model: LogprobModel, groups: Groups, device: torch.device) -> None:
        self._config = config
        self._groups = groups
        self._device = device
        self.model = model

    def weights(self) -> list[Tensor]:
        return own_tensors(self.model)

    def is_same_model(self, path: Path) -> bool:
        ours, theirs = (ModelDimensions.from_checkpoint(model) for model in (self._config.model.path, path))
        return ours == theirs and computes_alike(path, self._config)

    def load_hugging_face(self, path: Path) -> None:
        load_hf_weights(self.model, path, self._device)

    def load_weights(self, directory: Path) -> None:
        checkpoint.load_weights(directory, self.model, self._device)

    def save_weights(self, directory: Path) -> None:
        checkpoint.save_weights(directory, self.model, self._groups, self._device)

    def load(self, directory: Path) -> None:
        checkpoint.load_checkpoint(directory, self._config, self.model, self.optimizer, self._groups, self._device)

    def plan_save(self, directory: Path, snapshot: bool) -> CheckpointWriter:
        return checkpoint.plan_checkpoint(
            directory, self._config, self.model, self.optimizer, self._groups, self._device, snapshot
        )

    def export_weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        return export_buckets(self.model, self._dtype, bucket_bytes, self._device)

    def export_gradients(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        return export_buckets(self.model, torch.float32, bucket_bytes, self._device, self.optimizer.gradients())

    def export_hugging_face(self, directory: Path) -> None:
        buckets, names = self.export_weights(SHARD_BYTES), checkpoint_shapes(self.model)
        write_hf_directory(buckets, names, self._config.model.path, directory, 0, self._dtype, self._device)

    def offload(self, keep_weights: bool) -> None:
        offload.to_host(self.model, self.optimizer, keep_weights, self._config.trainer.optimizer.offload)

    def onload(self) -> None:
        offload.to_device(self.model, self.optimizer, self._device, self._config.trainer.optimizer.offload)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._config.model.dtype)
        return dtype
