"""What one rank does in the parity tests: score, take gradients of one step, then three optimizer steps."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import real_tokens, zero_weight_pack
from slime_like.config import RunConfig
from slime_like.interfaces import RankCoordinates, RankPlacement, ScoredLogprobs
from slime_like.trajectory import GRPOStats, PackedTrajectory
from tests.parallel.assembly import Shards, local_shard
from tests.parallel.held import Held, held_by


@dataclass
class RankResult:
    """``scored`` belongs to the packs ``pack_indices``; gradients are finished (reduced, divided).

    ``exported`` are the same gradients as the trainer gives them away, under Hugging Face's names.
    """

    coordinates: RankCoordinates
    pack_indices: list[int]
    scored: list[ScoredLogprobs] | None
    gradients: dict[str, Tensor]
    stats: list[GRPOStats | None]
    weights: dict[str, Tensor]
    exported: dict[str, Tensor] = field(default_factory=dict)
    held: Held | None = None


def train_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, steps: int
) -> RankResult:
    """Everything the parity tests compare, from one rank."""
    trainer = MegatronTrainer(config, placement)
    coordinates = trainer.setup()
    indices = list(range(coordinates.data, len(packs), coordinates.data_size))
    mine = [packs[index] for index in indices]
    window = -(-len(packs) // coordinates.data_size)
    filled = mine + [zero_weight_pack(packs[0])] * (window - len(mine))
    scored = trainer.score(filled)
    exported, gradients = _gradients(trainer, filled, denominator)
    stats = [_step(trainer, filled, denominator) for _ in range(steps)]
    trainer.settle_weights()
    result = RankResult(
        coordinates,
        indices,
        scored[: len(mine)] if scored is not None else None,
        gradients,
        stats,
        local_shard(trainer, gradients=False),
        exported,
        held_by(trainer),
    )
    trainer.shutdown()
    return result


def _gradients(
    trainer: MegatronTrainer, packs: list[PackedTrajectory], denominator: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the trainer exports, and what lies behind each parameter."""
    trainer.begin_step(denominator, real_tokens(packs))
    _two_windows(trainer, packs)
    buckets = trainer.export_gradients(denominator)
    exported = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors}
    return exported, local_shard(trainer, gradients=True)


def _step(trainer: MegatronTrainer, packs: list[PackedTrajectory], denominator: float) -> GRPOStats | None:
    trainer.begin_step(denominator, real_tokens(packs))
    _two_windows(trainer, packs)
    return trainer.finish_step(denominator)


def _two_windows(trainer: MegatronTrainer, packs: list[PackedTrajectory]) -> None:
    """As micro-batches stream in a step consists of several windows; their split must not show."""
    trainer.accumulate(packs[:1], last=len(packs) == 1)
    if packs[1:]:
        trainer.accumulate(packs[1:], last=True)


def gradients_of(placement: RankPlacement, config: RunConfig, pack: PackedTrajectory) -> list[Tensor]:
    """Of one step of two equal micro-batches, as they lie on this rank, from its trainer."""
    trainer = MegatronTrainer(config, placement)
    trainer.setup()
    trainer.begin_step()
    trainer.accumulate([pack, pack], last=True)
    trainer.finalize_gradients(3.0)
    found = [p.main_grad.clone() for chunk in trainer.chunks for p in chunk.parameters()]
    trainer.shutdown()
    return found


def by_stage(results: list[RankResult], what: str) -> Shards:
    """Shards of the first data- and context-parallel rank of every stage, with the experts of all its ranks."""
    shards = {
        (r.coordinates.pipeline, r.coordinates.tensor): dict(getattr(r, what))
        for r in results
        if r.coordinates.data == 0 and r.coordinates.context == 0
    }
    for result in results:
        for (stage, _), shard in shards.items():
            if stage == result.coordinates.pipeline:
                for name, value in getattr(result, what).items():
                    if "local_experts" in name:
                        shard.setdefault(name, value)
    return shards


def scored_packs(results: list[RankResult]) -> dict[int, list[ScoredLogprobs]]:
    """Pack index to the results of all ranks that return it."""
    found: dict[int, list[Any]] = {}
    for result in results:
        if result.scored is not None:
            for index, scored in zip(result.pack_indices, result.scored, strict=True):
                found.setdefault(index, []).append(scored)
    return found
