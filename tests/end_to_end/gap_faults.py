"""Engines and trainers with a fault each, for ``slime-like explain-gap``. ``ENTRY_POINTS`` names them."""

from typing import Any

from backends.fsdp import micro_batch
from backends.fsdp.trainer import FsdpTrainer
from rollout.transformers.engine import TransformersEngine
from slime_like.config import RunConfig
from slime_like.interfaces import BucketMetadata, RankPlacement

ENTRY_POINTS = """[slime_like.engines]
reversing = tests.end_to_end.gap_faults:ReversingEngine
[slime_like.backends]
exact = tests.end_to_end.gap_faults:ExactTrainer
shifted = tests.end_to_end.gap_faults:ShiftedTrainer
"""
REVERSED = "model.layers.1.mlp.down_proj.weight"


class ReversingEngine(TransformersEngine):
    """Engine that puts the rows of one tensor of an update into the wrong order. A loaded model is as it should be."""

    def _load_bucket(self, bucket: BucketMetadata) -> None:
        super()._load_bucket(bucket)
        if REVERSED in {entry.name for entry in bucket.entries}:
            tensor = self._destinations[REVERSED].data
            tensor.copy_(tensor.flip(0))


class ExactTrainer(FsdpTrainer):
    """Trainer that computes in float32, whatever ``model.dtype`` says."""

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        model = config.model.model_copy(update={"dtype": "float32"})
        super().__init__(config.model_copy(update={"model": model}), placement)


class ShiftedTrainer(FsdpTrainer):
    """Trainer with wrong positions in the second of several context ranks."""

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None:
        super().__init__(config, placement)
        usual = micro_batch.split_for_context_parallel

        def shifted(pack: Any, size: int, rank: int, **options: Any) -> Any:
            shard = usual(pack, size, rank, **options)
            if rank == 1:
                shard.position_ids = shard.position_ids + 2
            return shard

        micro_batch.split_for_context_parallel = shifted
