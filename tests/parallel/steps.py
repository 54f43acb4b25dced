"""What one rank does: a trainer that runs, what it holds, and the scores, gradients and steps of the parity tests."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.megatron import parallel
from backends.megatron.cpu_runtime import megatron_runtime
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


@contextmanager
def running(placement: RankPlacement, config: RunConfig, scores: bool = False) -> Iterator[MegatronTrainer]:
    """A trainer that is set up (to train, or only to score), and shut down after the block."""
    trainer = MegatronTrainer(config, placement)
    (trainer.setup_for_scoring if scores else trainer.setup)()
    yield trainer
    trainer.shutdown()


@contextmanager
def joined(placement: RankPlacement, config: RunConfig) -> Iterator[None]:
    """The configured layout's process groups, without a trainer."""
    with megatron_runtime():
        parallel.initialize(config, placement)
        yield
        parallel.leave()


def take_step(
    trainer: MegatronTrainer, packs: list[PackedTrajectory], denominator: float, last: bool = False
) -> GRPOStats | None:
    """One update from one window, which may be announced as the last."""
    trainer.begin_step()
    trainer.accumulate(packs, last=last)
    return trainer.finish_step(denominator)


def weights_of(trainer: MegatronTrainer) -> list[Tensor]:
    """A copy of this rank's parameters."""
    return [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]


def gradients_in(trainer: MegatronTrainer) -> list[Tensor]:
    """A copy of what lies behind this rank's parameters."""
    return [parameter.main_grad.clone() for chunk in trainer.chunks for parameter in chunk.parameters()]


def exported_from(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """A copy of the weights under their Hugging Face names."""
    return {name: tensor.clone() for bucket in trainer.export_weights() for name, tensor in bucket.tensors}


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same tensors in types, shapes and every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """The same names, and no element further apart than ``bound``."""
    assert found.keys() == expected.keys()
    gaps = {name: float((found[name].double() - tensor.double()).abs().max()) for name, tensor in expected.items()}
    worst = max(gaps, key=gaps.__getitem__)
    assert gaps[worst] <= bound, f"{worst}: {gaps[worst]:.2e}"


@contextmanager
def small_disk(nbytes: int | None) -> Iterator[None]:
    """A limit on the size of this process' files stands for a disk that is full; ``None`` for one that is not."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if nbytes is None else nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def train_rank(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], denominator: float, steps: int
) -> RankResult:
    """Everything the parity tests compare, from one rank."""
    with running(placement, config) as trainer:
        coordinates = trainer.coordinates
        indices = list(range(coordinates.data, len(packs), coordinates.data_size))
        mine = [packs[index] for index in indices]
        window = -(-len(packs) // coordinates.data_size)
        filled = mine + [zero_weight_pack(packs[0])] * (window - len(mine))
        scored = trainer.score(filled)
        _two_windows(trainer, filled, denominator)
        exported, gradients = exported_gradients(trainer, denominator), local_shard(trainer, gradients=True)
        stats = optimizer_steps(trainer, steps, denominator, lambda: _two_windows(trainer, filled, denominator))
        trainer.settle_weights()
        return RankResult(
            coordinates,
            indices,
            scored[: len(mine)] if scored is not None else None,
            gradients,
            stats,
            local_shard(trainer, gradients=False),
            exported,
            held_by(trainer),
        )


def _two_windows(trainer: MegatronTrainer, packs: list[PackedTrajectory], denominator: float) -> None:
    """As micro-batches stream in a step consists of several windows; their split must not show."""
    trainer.begin_step(denominator, real_tokens(packs))
    trainer.accumulate(packs[:1], last=len(packs) == 1)
    if packs[1:]:
        trainer.accumulate(packs[1:], last=True)


def exported_gradients(trainer: Any, denominator: float) -> dict[str, Tensor]:
    """A copy of the step's, finished, as the trainer gives them away."""
    return {name: tensor.clone() for bucket in trainer.export_gradients(denominator) for name, tensor in bucket.tensors}


def optimizer_steps(trainer: Any, steps: int, denominator: float, accumulate: Callable[[], None]) -> list[Any]:
    """The first takes the gradients that are there, and finished."""
    stats = []
    for step in range(steps):
        with pytest.MonkeyPatch.context() as patch:
            if step == 0:
                patch.setattr(trainer, "finalize_gradients", lambda denominator: None)
            else:
                accumulate()
            stats.append(trainer.finish_step(denominator))
    return stats


def gradients_of(placement: RankPlacement, config: RunConfig, pack: PackedTrajectory) -> dict[str, Tensor]:
    """Of one step of two equal micro-batches, as they lie on this rank; names do not tell how its modules compute."""
    with running(placement, config) as trainer:
        trainer.begin_step()
        trainer.accumulate([pack, pack], last=True)
        trainer.finalize_gradients(3.0)
        return local_shard(trainer, gradients=True)


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
