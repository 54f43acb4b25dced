"""One rank's shard of Megatron's model and optimizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from backends.common.trainer.state import TrainerState
from backends.megatron import checkpoint, conversion
from backends.megatron.checkpoint_writer import CheckpointWriter
from backends.megatron.conversion.placement import named_weights
from backends.megatron.head import LogprobModel
from backends.megatron.optimizer import Optimizer
from backends.megatron.overlap import Communication
from slime_like.config import RunConfig
from slime_like.interfaces import WeightBucket
from slime_like.models.dimensions import ModelDimensions


class MegatronState(TrainerState):
    """See ``TrainerState``.

    Attributes:
        wrapped, optimizer: the same chunks inside Megatron's DDP, and what updates them, in a trainer that trains.
    """

    wrapped: list[DistributedDataParallel]
    optimizer: Optimizer

    def __init__(self, config: RunConfig, chunks: Sequence[LogprobModel], dimensions: ModelDimensions) -> None:
        self._config = config
        self._dimensions = dimensions
        self.chunks = chunks

    def weights(self) -> list[Tensor]:
        return [weight for chunk in self.chunks for _, weight in named_weights(chunk)]

    def is_same_model(self, path: Path) -> bool:
        return ModelDimensions.from_checkpoint(path) == self._dimensions

    def load_hugging_face(self, path: Path) -> None:
        conversion.load_hf_weights(self.chunks, path, self._dimensions)

    def load_weights(self, directory: Path) -> None:
        checkpoint.load_weights(directory, self.chunks)

    def save_weights(self, directory: Path) -> None:
        checkpoint.save_weights(directory, self.chunks)

    def load(self, directory: Path) -> None:
        checkpoint.load_checkpoint(directory, self.chunks, self.optimizer)

    def plan_save(self, directory: Path, snapshot: bool) -> CheckpointWriter:
        return checkpoint.plan_checkpoint(directory, self.chunks, self.optimizer, snapshot)

    def export_weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        return conversion.export_buckets(self.chunks, self._dimensions, bucket_bytes)

    def export_gradients(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        Communication(self.wrapped).gather_gradients()
        return conversion.export_gradients(self.chunks, self._dimensions, bucket_bytes)

    def export_hugging_face(self, directory: Path) -> None:
        conversion.save_hf(self.chunks, self._dimensions, self._config.model.path, directory)

    def offload(self, keep_weights: bool) -> None:
        if not torch.cuda.is_available():
            return
        for buffer in self._gradient_buffers():
            buffer.offload_to_cpu(move_params=not keep_weights, move_grads=True)
        if not keep_weights:
            self._move_unbuffered(torch.device("cpu"))
        for part in self._optimizers_on_device():
            part.offload_to_cpu()
        torch.cuda.empty_cache()

    def onload(self) -> None:
        if not torch.cuda.is_available():
            return
        for buffer in self._gradient_buffers():
            buffer.reload_from_cpu(move_params=True, move_grads=True)
        self._move_unbuffered(torch.device("cuda", torch.cuda.current_device()))
        for part in self._optimizers_on_device():
            part.restore_from_cpu()

    def _gradient_buffers(self) -> list[Any]:
        return [buffer for chunk in self.wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def _move_unbuffered(self, device: torch.device) -> None:
        """Only the distributed optimizer keeps weights in DDP's buffers; others are moved one by one."""
        for chunk in self.wrapped:
            if not chunk.ddp_config.use_distributed_optimizer:
                for parameter in chunk.module.parameters():
                    parameter.data = parameter.data.to(device)

    def _optimizers_on_device(self) -> list[Any]:
        """Megatron's optimizers whose state is on the device. With ``trainer.optimizer.offload`` it never is."""
        return [part for part in self.optimizer.parts if not isinstance(part.optimizer, HybridDeviceOptimizer)]
