"""One rank's shard of Megatron's model and optimizer."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from backends.common.checkpoint.writing import CheckpointWriter
from backends.common.trainer.host_memory import HostCopies
from backends.common.trainer.state import TrainerState, is_added
from backends.megatron import checkpoint, conversion
from backends.megatron.conversion.placement import fill, named_weights, place_lora_weights
from backends.megatron.families.transforms import Shape
from backends.megatron.head import LogprobModel
from backends.megatron.optimizer import Optimizer
from backends.megatron.schedule import Communication
from slime_like.config import CheckpointConfig, ModelConfig
from slime_like.interfaces import WeightBucket, WeightExport
from slime_like.models.dimensions import ModelDimensions

if TYPE_CHECKING:
    from backends.common.trainer.lora import Initial


class MegatronState(TrainerState):
    """See ``TrainerState``.

    Attributes:
        wrapped, optimizer: the same chunks inside Megatron's DDP, and their optimizer, in a trainer that trains.
    """

    wrapped: list[DistributedDataParallel]
    optimizer: Optimizer

    def __init__(
        self,
        model: ModelConfig,
        settings: CheckpointConfig,
        chunks: Sequence[LogprobModel],
        dimensions: ModelDimensions,
    ) -> None:
        super().__init__()
        self._model, self._settings, self._dimensions = model, settings, dimensions
        self.chunks = chunks

    def weights(self) -> list[Tensor]:
        return [weight for chunk in self.chunks for _, weight in named_weights(chunk)]

    def lora_weights(self) -> list[Tensor]:
        return [each for chunk in self.chunks for name, each in chunk.named_parameters() if is_added(name)]

    def fill_lora_weights(self, source: Callable[[dict[str, Shape]], "Initial"]) -> None:
        placements = place_lora_weights(self.chunks, self._dimensions)
        named = (zip(each.source_names(), each.shapes, strict=True) for each in placements)
        fill(placements, source({name: shape for pairs in named for name, shape in pairs}))

    def is_same_model(self, path: Path) -> bool:
        return ModelDimensions.from_checkpoint(path) == self._dimensions

    def load_hugging_face(self, path: Path) -> None:
        conversion.load_hf_weights(self.chunks, path, self._dimensions, self._model.lora.path)

    def load_weights(self, directory: Path) -> None:
        checkpoint.load_weights(directory, self.chunks)

    def save_weights(self, directory: Path) -> None:
        checkpoint.save_weights(directory, self.chunks)

    def load(self, directory: Path) -> None:
        any_schedule = "schedule" in self._settings.override
        checkpoint.load_checkpoint(directory, self.chunks, self.optimizer, any_schedule)

    def plan_save(self, directory: Path, copies: HostCopies | None = None) -> CheckpointWriter:
        return checkpoint.plan_checkpoint(directory, self.chunks, self.optimizer, copies)

    def export_weights(self, bucket_bytes: int) -> WeightExport:
        return conversion.export_buckets(self.chunks, self._dimensions, bucket_bytes, self._model.lora.sends_factors)

    def export_gradients(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        Communication(self.wrapped).gather_gradients()
        return conversion.export_gradients(self.chunks, self._dimensions, bucket_bytes)

    def export_hugging_face(self, directory: Path) -> None:
        lora = self._model.lora if self._model.lora.is_set else None
        conversion.save_hf(self.chunks, self._dimensions, self._model.path, directory, lora=lora)

    def offload_to_host(self, keep_weights: bool) -> None:
        buffers = [each for chunk in self.wrapped for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self.offloaded.discard(buffer.grad_data for buffer in buffers)
        weights = self.weights()
        of_weights = {weight.untyped_storage().data_ptr() for weight in weights}
        # In float32, main weights are the weights. With trainer.optimizer.offload, they and moments are elsewhere.
        optimizers = [part.optimizer for part in self.optimizer.parts]
        tensors = [each for one in optimizers for group in one.param_groups for each in group["params"]]
        tensors += [each for one in optimizers for state in one.state.values() for each in state.values()]
        self.offloaded.offload(
            tensor
            for tensor in tensors
            if isinstance(tensor, Tensor)
            and tensor.device == weights[0].device
            and tensor.untyped_storage().data_ptr() not in of_weights
        )
        if not keep_weights:
            self.offloaded.offload(weights)
